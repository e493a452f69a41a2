"""`tracing_for`: traces as where a cluster's devices are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base import hardware
from autopar.requests import ClusterOrName, make_request

OLDEST_CAPABILITY = 8
"""Of the GPUs for which cuDNN has attention, for those of which no table says what they can do."""


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
    name = "cpu" if found is None else found.device.name
    if capability := capability_of(name):
        with answering_for(capability):
            yield
    else:
        yield


def capability_of(device_name: str) -> int:
    """The major compute capability of a kind of NVIDIA's GPUs; 0 of others.

    >>> capability_of("H100 SXM5 80GB"), capability_of("A100 SXM4 80GB"), capability_of("TPU v5e")
    (9, 8, 0)
    """
    from autopar.passes.sharding.compiler_rules import GPU, backend_of

    if backend_of(device_name) != GPU:
        return 0
    known = hardware.gpu_targets()["gpus"].items()
    majors = (x["compute_capability_major"] for kind, x in known if kind.upper() in device_name)
    return int(next(majors, OLDEST_CAPABILITY))
