"""Runs a pipelined plan in many processes: a Ray actor for each node of each of its meshes.

The driver (`driver/`) takes the plan apart (`actor/actor_plan.py`), sends each actor its part once
(`transport/pickling.py`), and then one small message a step. An actor (`actor/`) compiles its
pieces and runs its list of instructions; what one mesh sends another goes directly from process to
process (`transport/`). What is lost with an actor is made again (`recovery/`).
"""
