"""The models of the planning table: ordinary Flax train steps with abstract shapes.

`registry.build("gpt-2.6B")` is the step of one of them; `registry.NAMES` lists all.
"""
