"""Draws docs/plan.png: the plan of a 12-layer GPT for eight H100s, made without any of them.

python docs/plan_picture.py
"""

import sys
from pathlib import Path

import autopar
from autopar import report

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from planning import gpt_step  # noqa: E402

step, state, batch = gpt_step(12, width=1024, context=1024, batch=64)
plan = autopar.plan(step, state, batch, cluster=autopar.Cluster.preset("dgx-h100"))
report.save_plot(plan, HERE / "plan.png")
print(plan)
