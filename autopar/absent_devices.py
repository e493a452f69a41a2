"""`tracing_for`: traces as where a cluster's devices are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base import hardware
from autopar.base.errors import OptionError
from autopar.requests import ClusterOrName, make_request

OLDEST_CAPABILITY = 8
"""Of the GPUs for which cuDNN has attention, and of those that no table has."""


@contextmanager
def tracing_for(cluster: ClusterOrName) -> Iterator[None]:
    """Within it, JAX traces what it otherwise traces only where the cluster's devices are.

    That is attention by cuDNN. `plan`, `compile` and the others do so by themselves; this is for
    what is traced before, such as the shapes of a state.

    >>> import jax, jax.numpy as jnp, autopar
    >>> def attention(x):
    ...     return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
    >>> with autopar.tracing_for("8xh100"):
    ...     jax.eval_shape(attention, jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)).shape
    (2, 128, 4, 64)

    Args:
      cluster: a `Cluster`, or the name of one such as "8x8 h100".

    Raises:
      OptionError: it is no cluster.
    """
    from autopar.passes.graph.absent_cudnn import answering_for

    found = make_request({}, cluster, None).cluster
    if found is None:
        raise OptionError(
            "tracing_for(None) is not possible.",
            why="it traces for devices that are named; without it JAX traces for those here.",
            hint='use a name such as "8x8 h100".',
        )
    if capability := capability_of(found.device.name):
        with answering_for(capability):
            yield
    else:
        yield


def capability_of(device_name: str) -> int:
    """The major compute capability of NVIDIA's GPUs for which cuDNN has attention; 0 of others.

    >>> [capability_of(x) for x in ("nvidia h100", "A100 SXM4 80GB", "NVIDIA GB200", "mine")]
    [9, 8, 10, 8]
    >>> [capability_of(x) for x in ("V100 SXM2 16GB", "AMD Instinct MI300X", "TPU v5e", "cpu")]
    [0, 0, 0, 0]
    """
    from autopar.passes.sharding.compiler_rules import GPU, backend_of

    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if backend_of(device_name) != GPU or words & {"AMD", "INSTINCT", "INTEL"}:
        return 0
    found = hardware.known_capability(device_name) or OLDEST_CAPABILITY
    return found if found >= OLDEST_CAPABILITY else 0
