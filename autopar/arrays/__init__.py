"""Kinds of arrays beside `jax.Array`, and the memory that several of them share."""
