"""A step whose backward pass computes values of the forward pass again instead of keeping them.

- `choice`: which values are kept at a price per byte, by a minimum cut, or in the hosts' memory;
- `run_again`: the step in which the others are computed again before they are first read;
- `override`: the step without the user's own `jax.checkpoint`.
"""
