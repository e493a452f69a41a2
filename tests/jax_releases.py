"""What depends on the release of JAX: the tests' figures are those of one, and are exact there."""

import jax

OURS = "0.10"
"""Pages print what this release makes of their programs, and limits of memory lie where it does."""

IS_OURS = jax.__version__.startswith(f"{OURS}.")
