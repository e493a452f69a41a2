"""Pipeline stages: the microbatched program cut into one program per stage.

In the order in which a program passes through them:

- `conditionals`: conditionals over the whole state taken apart;
- `anatomy`: prologue, loop and epilogue taken apart; what is forward, backward, or copied freely;
- `twins`: the forward equation that a heavy backward equation belongs to;
- `layer_scans`, `layering`: forward equations clustered into layers, and layers into stages;
- `runs`, `run_rules`: scans over layers cut between stages, with the leaves that are stacked by
  layer;
- `accumulators`: sums over microbatches whose terms may be made on several stages;
- `placement`, `mincut`: backward and epilogue equations go to stages by nested minimum cuts;
- `program`: the whole program with every equation's stage, accumulators split where needed;
- `demand`, `assemble`: what each stage computes, receives and sends, and its graph;
- `slicing`: the function that does all this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar import _lazy

if TYPE_CHECKING:
    from .layering import layers
    from .result import Layer, Layers, LeafRows, Link, StageGraph, Stages
    from .slicing import slice_stages
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "Layer": ".result",
            "Layers": ".result",
            "LeafRows": ".result",
            "Link": ".result",
            "StageGraph": ".result",
            "Stages": ".result",
            "layers": ".layering",
            "slice_stages": ".slicing",
        },
    )

__all__ = ["Layer", "Layers", "LeafRows", "Link", "StageGraph", "Stages", "layers", "slice_stages"]
