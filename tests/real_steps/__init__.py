"""Train steps of the kinds that real models are made of, beside `programs`: a second registry.

`programs` holds whole programs in every variant and is planned, sliced, sharded and run by many
tests. The steps here are more, each about one thing that once failed or easily could: remat
policies, bfloat16 under scans, kernels, graph objects, losses that need the whole batch.
`test_real_steps.py` runs each on one mesh, in microbatches and in stages.
"""

from .registry import REAL_STEPS, RealStep

__all__ = ["REAL_STEPS", "RealStep"]
