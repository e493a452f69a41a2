"""Runs a pipelined plan in many processes: a Ray actor for each node of each of its meshes.

The driver takes the plan apart (`parts.py`, `routes.py`), sends each actor its part once
(`pickling.py`), and then one small message a step (`pipeline.py`). An actor (`actor.py`) compiles
its pieces and runs its list of instructions (`process_step.py`); what one mesh sends another goes
directly from process to process (`transport.py`).
"""
