"""The table of primitives beside JAX's own: a new release shows here what it brought."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.passes.graph import primitives

# Primitives without a row, by the reason.
UNKNOWN = {
    "collectives exist inside of `jax.shard_map`, of which `device_blocks.py` knows some": """
        all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
        all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast
        pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin ppermute ppermute_done
        ppermute_start preduced precv psend psum psum_done psum_invariant psum_invariant_start
        psum_start pvary ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start
        reduced_vary_cast reduced_vary_cast_p shard_map unreduced_pmax unreduced_pmin unreduced_psum
        unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
        vary_unreduced_cast vary_unreduced_cast_p
        """,
    "state by reference: a step is a pure function": """
        accum_grad_in_ref addupdate box_get box_set core_map create_linear dce_sink empty_ref
        free_ref freeze get log_extend log_read new_box new_log new_ref pin run_state swap unpin
        """,
    "effects and foreign code run whole on every device, with a warning": """
        after_all call_exported check composite create_token cudnn_fusion
        ffi_call inspect_sharding io_callback pure_callback
        """,
    "kernels that say nothing of their loops": """
        dot_product_attention_bwd
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd ormqr scaled_dot scaled_matmul
        scaled_matmul_wrapper symmetric_product
        """,
    "they exist while JAX traces, differentiates or lowers; a step's jaxpr has none": """
        broadcast_to dim_as_value dimension_size empty from_edtype iota_2x32_shape
        linear_call program_order remat_opt shape_assertion stage to_edtype unreachable
        """,
    "layouts and memory spaces belong to a user's own devices": """
        layout_constraint relayout with_memory_space_constraint
        """,
    "generators that no key of `jax.random` uses": "philox2x32 philox4x32 threefry4x32",
    "they join arrays of several processes, outside of a step": """
        global_array_to_host_local_array host_local_array_to_global_array
        """,
    "one of its functions is what it computes, and is inlined": "custom_linear_solve",
}


OF_JAX = """
import jax, jax.nn, jax.numpy, jax.scipy
from jax.extend.core import primitives as extended
from jax.interpreters import ad, mlir
modules = (jax.lax, extended)
named = {getattr(m, name).name for m in modules for name in dir(m) if name.endswith("_p")}
lowered = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
tables = (ad.primitive_jvps, ad.primitive_transposes, *lowered)
print(*sorted(named | {primitive.name for table in tables for primitive in table}))
"""


@functools.cache
def of_jax() -> frozenset[str]:
    """The names of all primitives that JAX's public modules know a rule or a name of.

    In a process of its own: other libraries and parts of JAX add more when they are imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", OF_JAX], capture_output=True, text=True, timeout=300, check=True
    )
    return frozenset(done.stdout.split())


def test_every_primitive_of_jax_has_a_row_or_a_reason() -> None:
    unknown = {name for text in UNKNOWN.values() for name in text.split()}
    assert not unknown & primitives.TABLE.keys()
    assert of_jax() <= primitives.TABLE.keys() | unknown


def test_every_row_is_a_primitive_of_jax() -> None:
    missing = primitives.TABLE.keys() - of_jax() - primitives.OTHER_RELEASES.keys()
    assert not missing


def test_a_trait_is_one_that_passes_can_ask() -> None:
    with pytest.raises(AssertionError, match="no primitive is marked"):
        primitives._having("heavi")


@pytest.mark.parametrize("method", ["add", "subtract", "multiply", "min", "max"])
def test_every_scatter_opens_a_group(method: str) -> None:
    def function(x: jax.Array, i: jax.Array, y: jax.Array) -> Any:
        return getattr(x.at[i], method)(y)

    jaxpr = jax.make_jaxpr(function)(jnp.ones(8), jnp.arange(4), jnp.ones(4))
    (scatter,) = (e for e in jaxpr.eqns if e.primitive.name.startswith("scatter"))
    assert scatter.primitive.name in primitives.OPENS_GROUP & primitives.UNFUSED
