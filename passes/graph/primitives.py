"""What every pass needs to know of JAX's primitives: one table, and the sets that passes ask.

A row names primitives and their traits; what a trait means, and who asks, stands at the set that is
made of it below. `tests/test_primitives.py` holds the table against the primitives that JAX has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

FactorKind = Literal["pass", "sum", "max", "min", "prod", "and", "or", "replicated"]
"""What becomes of a factor that is cut: it is passed on, combined by a monoid, or cannot be cut."""

_ROWS = """
# elementwise
acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e clz digamma eq_to  : elementwise
erf_inv igamma igamma_grad_a igammac le_to lgamma lt_to mulhi nextafter         : elementwise
polygamma polynomial population_count regularized_incomplete_beta               : elementwise
threefry2x32 zeta                                                               : elementwise
one_minus_square shift_left shift_right_arithmetic shift_right_logical   : elementwise cheap
add add_any                 : elementwise adds updates =sum
sub                         : elementwise cheap keeps_zero linear_all pulled updates
mul                         : elementwise cheap combines linear_each pulled scales =prod
div                         : elementwise root linear_first pulled scales
and                         : elementwise cheap combines updates =and
or                          : elementwise cheap combines updates =or
max                         : elementwise cheap combines updates =max
min                         : elementwise cheap combines updates =min
clamp not xor               : elementwise cheap updates
abs integer_pow square      : elementwise cheap scales
neg                         : elementwise cheap keeps_zero linear_first passed pulled scales
cbrt rem                    : elementwise scales
rsqrt sqrt                  : elementwise root scales
cosh erfc sinh tan          : elementwise transcendental
cos erf exp exp2 expm1 log log1p log2 logistic pow sin tanh  : elementwise transcendental scales
eq ge gt is_finite le lt ne : elementwise cheap step
ceil floor round sign       : elementwise cheap step scales
select_n                    : elementwise cheap keeps_zero pulled updates
convert_element_type        : elementwise cheap casts keeps_zero passed pulled updates
reduce_precision            : elementwise cheap keeps_zero updates
complex                     : elementwise linear_all
conj                        : elementwise linear_first
imag                        : elementwise cheap linear_first
real                        : elementwise cheap keeps_zero linear_first
name stop_gradient          : elementwise cheap linear_first rearranges
device_put                  : elementwise hint linear_first rearranges
constrain   : elementwise cheap casts linear_first passed pulled rearranges updates
copy        : elementwise cheap casts distinct linear_first passed rearranges updates
random_clone tie            : elementwise moves
# moving elements
broadcast_in_dim            : cheap cut_anywhere linear_first pulled reshapes
reshape                     : cheap cut_anywhere linear_first passed pulled reshapes updates
squeeze                     : cheap cut_anywhere linear_first passed reshapes updates
transpose                   : cut_anywhere linear_first passed pulled reshapes updates
concatenate                 : cut_anywhere linear_all pulled rearranges unfused updates
pad                         : cut_anywhere linear_all positional rearranges updates
stack                       : linear_all rearranges
unstack                     : linear_first rearranges
slice                       : cheap cut_anywhere linear_first rearranges updates
split                       : cut_anywhere linear_first rearranges updates
tile                        : cut_anywhere linear_first positional rearranges
rev                         : linear_first rearranges updates
exchange      : cut_anywhere keeps_zero linear_first moves opens_group positional unfused
gather                      : linear_first opens_group rearranges unfused
dynamic_slice               : linear_first opens_group rearranges updates
dynamic_update_slice        : opens_group rearranges unfused updates
iota                        : cheap cut_anywhere moves positional
optimization_barrier        : cut_anywhere distinct linear_all moves unfused updates
to_host                     : cut_anywhere distinct linear_first moves unfused
bitcast_convert_type random_unwrap random_wrap  : moves
scatter                     : moves scatter updates
scatter-add scatter-sub     : scatter updates =sum
scatter-max                 : scatter updates =max
scatter-min                 : scatter updates =min
scatter-mul                 : scatter scales =prod
# reductions and products
reduce_sum      : cut_anywhere keeps_zero linear_first passed pulled reduction unfused =sum
reduce_max      : cut_anywhere reduction unfused =max
reduce_min      : cut_anywhere reduction =min
reduce_prod     : cut_anywhere reduction =prod
reduce_and      : cut_anywhere reduction =and
reduce_or       : cut_anywhere reduction =or
reduce          : cut_anywhere reduction
argmax argmin reduce_xor  : reduction
cumsum          : cumulative keeps_zero linear_first
cumlogsumexp cummax cummin cumprod  : cumulative
reduce_window reduce_window_max reduce_window_min select_and_scatter  : window
reduce_window_sum select_and_gather_add  : linear_first window
select_and_scatter_add  : linear_first opens_group unfused window
conv_general_dilated dot_general  : cut_anywhere linear_each opens_group product unfused
block_product           : cut_anywhere linear_each opens_group positional product unfused
ragged_dot_general      : cut_anywhere linear_each opens_group positional product unfused
fft                     : heavy linear_first
sort                    : opens_group sorts unfused
approx_top_k top_k      : sorts
cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu  : matrix_function
lu_pivots_to_permutation qr schur svd triangular_solve tridiagonal               : matrix_function
tridiagonal_solve                                                                : matrix_function
# random bits, effects
random_bits random_fold_in random_gamma random_split  : draws
random_seed rng_bit_generator rng_uniform             :
debug_callback debug_print empty2 platform_index      :
# kernels: their bodies compute on blocks and references of their own
dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper  : kernel
custom_partitioning local_call pallas_call                                        : kernel
# bodies
cond scan       : control_flow
while           : control_flow unfused
jit pjit        : body=jaxpr
call closed_call eval_jaxpr custom_jvp_call custom_lin custom_vjp_call  : body=call_jaxpr
custom_vmap_call          : body=call
checkpoint remat remat2   : body=jaxpr remat
call_hi_primitive         :
mesh_cast                    : identity
reshard sharding_constraint  : hint identity
"""

# What has the first trait has the others as well.
_IMPLIED = {
    "adds": "cheap combines keeps_zero linear_all pulled",
    "control_flow": "heavy",
    "cumulative": "opens_group unfused",
    "kernel": "cut_anywhere heavy opens_group positional unfused",
    "matrix_function": "heavy",
    "product": "heavy",
    "rearranges": "keeps_zero moves",
    "reshapes": "rearranges",
    "scatter": "opens_group unfused",
    "updates": "scales",
}

# Names that JAX 0.10.2 by itself does not have, and where they stand.
OTHER_RELEASES: Mapping[str, str] = {
    "constrain": "autopar's own: what a user's sharding constraint says, see `constraints.py`",
    "to_host": "autopar's own: a value that waits in the hosts' memory, see `host_values.py`",
    "exchange": "autopar's own: rows to blocks of experts and back, see `exchanges.py`",
    "block_product": "autopar's own: products in these blocks, see `block_products.py`",
    **dict.fromkeys(("one_minus_square", "polynomial"), "JAX 0.12"),
    "log2": "JAX 0.11",
    "local_call": "autopar's own",
    "pallas_call": "jax.experimental.pallas",
    **dict.fromkeys(
        ("call", "checkpoint", "closed_call", "mesh_cast", "pjit", "remat"),
        "names of the same by release",
    ),
}


def _parse() -> dict[str, frozenset[str]]:
    table: dict[str, frozenset[str]] = {}
    for row in _ROWS.splitlines():
        names, _, text = row.partition(":")
        if not names or names.startswith("#"):
            continue
        traits = text.split()
        for trait in traits:  # grows while it is read
            traits += _IMPLIED.get(trait, "").split()
        for name in names.split():
            assert name not in table, f"{name} has two rows"
            table[name] = frozenset(traits)
    return table


TABLE: Mapping[str, frozenset[str]] = _parse()


def _having(trait: str) -> frozenset[str]:
    found = frozenset(name for name, traits in TABLE.items() if trait in traits)
    assert found, f"no primitive is marked {trait}"
    return found


def _monoids(trait: str) -> dict[str, FactorKind]:
    kinds: tuple[FactorKind, ...] = ("sum", "max", "min", "prod", "and", "or")
    return {name: kind for kind in kinds for name in _having(trait) & _having(f"={kind}")}


# What it computes.

# One result element from the operands' elements at the same place. Operands may be of rank 0, or
# have dimensions of size 1 that are repeated.
ELEMENTWISE = _having("elementwise")
# Combine operands by a monoid: in any order, on the slices of a batch or the scalars of stages.
COMBINES = _monoids("combines")
ADDS = _having("adds")
# Copies and casts: what is added to a sum may pass through them.
CASTS = _having("casts")
# Combine the elements of a dimension. `MONOID_REDUCTIONS` say by what.
REDUCTIONS = _having("reduction")
MONOID_REDUCTIONS = _monoids("reduction")
CUMULATIVE = _having("cumulative")
WINDOWS = _having("window")
# The monoid by which updates are combined with what is there; None: they replace it.
SCATTERS: Mapping[str, FactorKind | None] = {
    **dict.fromkeys(_having("scatter")),
    **_monoids("scatter"),
}
# Contractions, which take a multiplication and an addition per iteration: a device's matrix FLOPs.
PRODUCTS = _having("product")
# Functions of the trailing matrices, applied to each of a batch.
MATRIX_FUNCTIONS = _having("matrix_function")
SORTS = _having("sorts")
# Random bits whose values depend on `jax_threefry_partitionable`.
DRAWS = _having("draws")

# How it moves elements.

# They move, copy or reinterpret elements and compute nothing: no FLOPs.
MOVES = _having("moves")
# Moves whose result elements are elements of their operands, as numbers of the same dtype: zeros
# stay zeros, every monoid's partial results stay partial results, a key's bits stay its bits.
REARRANGES = _having("rearranges")
# Rearrangements by shape alone, which are for stages as good as elementwise.
RESHAPES = _having("reshapes")
# A result is zero where all operands are. Not a product: the other factor may be infinite.
KEEPS_ZERO = _having("keeps_zero")
# Every dimension can be cut in some way (the rule says together with which).
CUT_ANYWHERE = _having("cut_anywhere")
# Params hold shapes or positions of the whole that stages do not rewrite for runs of layers, or
# results depend on the place.
POSITIONAL = _having("positional") | DRAWS | _having("scatter")

# Linearity, some with conditions that `linear_operands` knows: in the first operand, the others
# (indices, a divisor) held fixed; jointly in all; in each of the two while the other is held fixed.
LINEAR_FIRST = _having("linear_first")
LINEAR_ALL = _having("linear_all")
LINEAR_EACH = _having("linear_each")
# Cheap linear operations that may be evaluated on partial sums in the loop over microbatches, where
# the carry gets smaller by it.
PULLED = _having("pulled")
# Linear in their one operand and not worth a stage: where a shared parameter's gradient is a sum
# over stages, the sum passes through them. Unlike `PULLED`, none that makes a value larger.
PASSED = _having("passed")

# What it costs.

# What stages are balanced by, and what is never computed wherever it is read. The sharding pass
# asks `OPENS_GROUP`: a gather weighs nothing, but has layouts of its own.
HEAVY = _having("heavy")
# They open a group of their own in the integer program: what they cost depends on what they cut.
OPENS_GROUP = _having("opens_group")
# XLA writes their results (and reads their operands) rather than fuse them with what is around.
UNFUSED = _having("unfused")
# They end a fusion: their operands may be fused into them, though their results are written.
ENDS_FUSION = UNFUSED & REDUCTIONS
# What computing an element again costs a backward pass: a vector operation, some, or many.
CHEAP = _having("cheap")
ROOTS = _having("root")
TRANSCENDENTAL = _having("transcendental")
# Results jump where an operand of real numbers changes a little: not computed again.
STEPS = _having("step")

# What a result may be of an operand: state that a step updates (`UPDATES`), also scaled (`SCALES`).
UPDATES = _having("updates")
SCALES = _having("scales")
# Equations that are alike stay two: a barrier is there so that what follows is computed again.
DISTINCT = _having("distinct")

# Bodies.

CONTROL_FLOW = _having("control_flow")
# Calls, which tracing inlines, with the param that holds the body; those that rematerialize it.
BODY_PARAM = {
    name: trait.removeprefix("body=")
    for name, traits in TABLE.items()
    for trait in traits
    if trait.startswith("body=")
}
REMATS = _having("remat")
# Calls of one whole: what is inside is no part of the step, and has effects on its own references.
KERNELS = _having("kernel")
# Code that JAX cannot look into: it has no row, because nothing is known of it.
FOREIGN = frozenset({"ffi_call", "call_exported", "cudnn_fusion"})
# A user's sharding hints for a mesh of their own do not change the numbers.
IDENTITIES = _having("identity")


def keeps_order(eqn: JaxprEqn) -> bool:
    """Whether a transpose moves dimensions of one place alone: the elements stay as they lie."""
    if eqn.primitive.name != "transpose":
        return False
    shape = eqn.invars[0].aval.shape
    order = [dim for dim in eqn.params["permutation"] if shape[dim] != 1]
    return order == sorted(order)


def is_identity(eqn: JaxprEqn) -> bool:
    """Whether an equation's result is its operand: also what turns dimensions of one place round.

    The backward pass of a convolution with a filter of one pixel has that; that of a sum over an
    axis of `jax.vmap` has sums over no axes.
    """
    name = eqn.primitive.name
    if name in ("psum", "pmax", "pmin"):
        return not eqn.params["axes"]
    if name != "rev":
        return name in IDENTITIES
    return all(eqn.invars[0].aval.shape[dim] == 1 for dim in eqn.params["dimensions"])


SHARDING_HINTS = _having("hint")
CONSTRAIN = "constrain"  # what is kept of it

TO_HOST = "to_host"  # what `autopar.passes.recompute` writes for what waits in the hosts' memory

# What `autopar.passes.experts` writes for grouped products.
EXCHANGE, BLOCK_PRODUCT = "exchange", "block_product"
