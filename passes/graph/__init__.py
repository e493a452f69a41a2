"""The compiler's values, and what it knows of JAX's programs.

- `graph`: a flat program with labelled leaves; `microbatched`: the same in phases;
- `primitives`: one table of what every pass needs to know of each of JAX's primitives;
- `logical`, `jax_compat`: programs on logical shapes, and the one place that touches JAX's insides.
"""
