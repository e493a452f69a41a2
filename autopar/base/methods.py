"""The values of the option `method`."""

from __future__ import annotations

from typing import Any

from autopar.base.errors import OptionError, did_you_mean

BATCH_METHODS = ("data", "zero1", "zero2", "zero3", "hsdp")
"""The values of `method` that cut the batch along all axes of the mesh, and nothing else."""

WHOLE_PARAMETERS = ("data", "zero1", "zero2")
"""Those of them that store parameters whole on every device."""

LOOP_METHODS = ("megatron", "megatron_sp", "expert")
"""The values of `method` that cut loops of the weights along the last axis of the mesh."""

METHODS = ("auto", *BATCH_METHODS, *LOOP_METHODS, "shard")
"""The values of `method`; each but "auto" restricts the plans that are considered."""


def check_method(method: Any) -> None:
    """Refuse what is no method.

    Raises:
      OptionError: says which there are, and the closest.
    """
    if isinstance(method, str) and method in METHODS:
        return
    if method == "pipeline":
        raise OptionError(
            "There is no method 'pipeline'.",
            why="a method says how one mesh is used; stages say how many meshes there are.",
            hint="use stages=2 (with any method).",
        )
    raise OptionError(
        f"There is no method {method!r}.",
        why=f"the methods are {', '.join(METHODS)}.",
        hint=did_you_mean(method, METHODS),
    )
