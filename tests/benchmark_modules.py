"""The benchmarks' modules that tests check, imported as the benchmarks import each other.

Their folder is on `sys.path` meanwhile only: some of its scripts have names of folders of tests.
"""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[1] / "benchmarks")

sys.path.append(FOLDER)
try:
    import attention
    import compiler_cases
    import compilers
    import contest
    import gpu
    import gpu_profile
    import gpu_setting
    import lattices
    import paper_cases
    import pipedream
    import placed_worker
    import plain_model
    import planner_cases
    import written_steps
    from contest import evaluate, is_allowed, peak_usage
    from models import deepseek, delta, moe, other_kinds, registry
finally:
    sys.path.remove(FOLDER)

__all__ = [
    "attention",
    "compiler_cases",
    "compilers",
    "contest",
    "deepseek",
    "delta",
    "evaluate",
    "gpu",
    "gpu_profile",
    "gpu_setting",
    "is_allowed",
    "lattices",
    "moe",
    "other_kinds",
    "paper_cases",
    "peak_usage",
    "pipedream",
    "placed_worker",
    "plain_model",
    "planner_cases",
    "registry",
    "written_steps",
]
