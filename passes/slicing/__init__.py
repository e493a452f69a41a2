"""Pipeline stages: a microbatched step cut into one step in phases per stage.

In the order in which a program passes through them:

- `conditionals`: conditionals over the whole state taken apart;
- `anatomy`: which equations are forward, backward, or copied freely;
- `primals`: the forward equation that a heavy backward equation belongs to;
- `layer_scans`, `layering`: forward equations clustered into layers, and layers into stages;
- `backward_scans`, `runs`, `run_builder`, `run_rules`: scans cut between tasks or between stages;
- `accumulators`: sums over microbatches whose terms may be made on several stages;
- `placement`, `mincut`: backward and epilogue equations go to stages by nested minimum cuts;
- `placed`: the whole program with every equation's stage, accumulators split where needed;
- `transfers`, `assemble`: what each stage computes, receives and sends, and its step;
- `slice_stages`: the function that does all this; `stage_graphs`: the values that it returns.
"""
