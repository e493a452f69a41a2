"""Draws docs/pipeline.png: a 24-layer GPT in four stages on four nodes of eight H100s each.

python docs/pipeline_picture.py
"""

import sys
from pathlib import Path

import autopar
from autopar import report

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from planning import gpt_step  # noqa: E402

step, state, batch = gpt_step(24, width=2048, context=1024, batch=256)
cluster = autopar.Cluster.preset("dgx-h100", nodes=4)
plan = autopar.plan(step, state, batch, cluster=cluster, stages=4, microbatches=8)
report.save_plot(plan, HERE / "pipeline.png")
report.print_plan(plan)
