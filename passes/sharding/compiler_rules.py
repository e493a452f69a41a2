"""What compilers hold in memory: a small model for each backend, and how every rule was found.

A backend is where a program will run: what XLA makes for a GPU is not what it makes for a CPU.
Every rule for GPUs was read from compiled programs: XLA:GPU of jax 0.10.2 for an H100
(`benchmarks/compilers.py`), its buffer assignment (`xla_dump_to`) at the worst moment beside the
values that were planned to be there. None is a fitted factor.

**For GPUs**

- Fusion (`priority_fusion.cc`): an elementwise value is computed again by all who read it, however
  far away they are, if that is quicker than to write it and to read it. So the backward pass reads
  the products of the forward pass, not what was made of them: of a softmax in float32 there are
  the scores and the weights in bfloat16, of a GELU its argument, its tanh and its result. A value
  is written for all readers or for none (`CanFuseWithAllNonBitcastUsers`).
- Time (`gpu_performance_model.cc`): bytes over the bandwidth, operations over the device's speed
  at vectors. A tanh costs more than the write and the read of a bfloat16, an exp less;
  `OPERATIONS` say how many operations of vectors each is, to within what decides.
- Products, convolutions, sorts and loops read buffers. A gather, a scatter and a slice's update
  take in what makes their indices and updates.
- Reshapes and transposes that products read are the same buffer: products take operands in any
  order of their dimensions (Triton's and cuBLAS's).
- In place: an elementwise fusion writes over an operand of the same size that nobody reads later; a
  scatter and a slice's update over what they change. Not over rows that the same kernel reduces
  (softmax, forward and backward: kernels of Triton's share no buffers), nor the update of a
  convolution's filter: its gradient has another order of dimensions, so parameter and moments are
  written beside the old ones.
- A broadcast of a constant is made in the loop that reads it (`while_loop_constant_sinking.cc`).
- A loop's body copies the slice of a stacked operand that a product reads; elementwise readers
  slice it themselves.
- What was gathered along another dimension than the first lies in that order. Products take it so;
  a loop that reads slices has a copy in the usual order, beside what a later loop will read.
- Order: XLA may leave what nothing waits for to the end (`memory_scheduler.cc`), and so all that it
  reads stays. Stages are compiled with an order of their own (`run_order.py`), which is counted.

**For CPUs and TPUs** a value is fused into its readers if these are near (`peak_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import (
    CONTROL_FLOW,
    CUMULATIVE,
    ELEMENTWISE,
    PRODUCTS,
    REDUCTIONS,
    SCATTERS,
    SORTS,
)

GPU, CPU, TPU = "gpu", "cpu", "tpu"

OPERATIONS = {
    **dict.fromkeys(("erf", "erfc", "erf_inv", "lgamma", "digamma", "sin", "cos", "tan"), 200),
    **dict.fromkeys(("tanh", "pow", "atan2", "asinh", "acosh", "atanh", "sinh", "cosh"), 120),
    **dict.fromkeys(("logistic", "log1p", "cbrt"), 60),
    **dict.fromkeys(("expm1", "rem"), 40),
    **dict.fromkeys(("log", "exp", "exp2"), 20),
    **dict.fromkeys(("rsqrt", "sqrt", "div"), 10),
}
"""Operations of an elementwise primitive for one element, where it is not one."""

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 3.35e12, 59e12
"""Of an H100's memory, and of its vector units; what decides is the ratio, alike on others."""

FUSED_MOVES = frozenset(
    (
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "gather",
        "iota",
        "pad",
        "rev",
        "slice",
        "split",
        "tile",
    )
)
"""What is no arithmetic, and computed by those who read it."""

SAME_BUFFER = frozenset(
    (
        "bitcast_convert_type",
        "name",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    )
)
"""What is no operation at all for the compiler."""

READS_BUFFERS = PRODUCTS | CONTROL_FLOW | CUMULATIVE | SORTS | {"fft", "sort"}
IN_PLACE = frozenset(SCATTERS) | {"dynamic_update_slice"}
"""They write into their first operand."""


ROW_ELEMENTS = 16384
"""Of the longest row that a kernel of Triton's holds: attention's are, vocabularies' are not."""


@dataclass(frozen=True)
class CompilerRules:
    """How a backend's compiler holds values.

    Args:
      backend: "gpu", "cpu" or "tpu".
      fuses_anywhere: readers compute again what is quicker to compute than to read, wherever
        they are.
      keeps_order: programs are compiled so that they run in the order of the plan.
    """

    backend: str
    fuses_anywhere: bool = False
    keeps_order: bool = False


RULES = {
    GPU: CompilerRules(GPU, fuses_anywhere=True, keeps_order=True),
    CPU: CompilerRules(CPU),
    TPU: CompilerRules(TPU),
}


def backend_of(device_name: str) -> str:
    """The backend of a kind of device, by its name.

    >>> backend_of("NVIDIA H100 80GB HBM3"), backend_of("TPU v5 lite"), backend_of("cpu")
    ('gpu', 'tpu', 'cpu')
    """
    name = device_name.lower()
    return next((kind for kind in (TPU, CPU) if kind in name), GPU)


def rules_of(device_name: str) -> CompilerRules:
    """The rules for a kind of device."""
    return RULES[backend_of(device_name)]


def is_same_buffer(eqn: JaxprEqn, bytes_read: int, bytes_made: int) -> bool:
    """Whether an equation with one operand and one result only names its operand anew."""
    name = eqn.primitive.name
    if name in SAME_BUFFER:
        return True
    return name == "broadcast_in_dim" and bytes_read == bytes_made


def may_be_fused(eqn: JaxprEqn) -> bool:
    """Whether those who read an equation's results can compute them."""
    name = eqn.primitive.name
    return (name in ELEMENTWISE or name in FUSED_MOVES) and not is_barrier(eqn)


def writes_buffer(eqn: JaxprEqn) -> bool:
    """Whether an equation's results are buffers of their own, whoever reads them."""
    return not may_be_fused(eqn) and eqn.primitive.name not in SAME_BUFFER and not is_barrier(eqn)


def takes_in(eqn: JaxprEqn, place: int) -> bool:
    """Whether an equation can compute its operand at a place itself."""
    name = eqn.primitive.name
    if name in READS_BUFFERS or is_barrier(eqn):
        return False
    return not (name in IN_PLACE and place == 0)


def reduces_rows(eqn: JaxprEqn) -> bool:
    """Whether a reduction is one kernel with what reads the result beside its operand."""
    if eqn.primitive.name not in REDUCTIONS or not eqn.params.get("axes"):
        return False
    shape = eqn.invars[0].aval.shape
    return tuple(eqn.params["axes"]) == (len(shape) - 1,) and shape[-1] <= ROW_ELEMENTS


def operations(eqn: JaxprEqn) -> int:
    """Of one element of an equation's result."""
    return OPERATIONS.get(eqn.primitive.name, 1)
