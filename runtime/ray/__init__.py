"""Runs a pipelined plan in many processes: one Ray actor for each mesh of the plan.

The driver takes the plan apart (`parts.py`, `routes.py`), sends each actor its part once
(`pickling.py`), and then one small message a step (`pipeline.py`). An actor (`actor.py`) compiles
its pieces and runs its list of instructions (`mesh_step.py`); what one mesh sends another goes
directly from process to process (`transport.py`).
"""
