"""Random train steps, compared with plain `jax.jit`."""
