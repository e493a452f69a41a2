"""Softmaxes that XLA:GPU computes in two kernels for an H200.

A softmax of few rows is split there, by XLA's own estimate of both ways
(`softmax_rewriter_triton.cc`): one kernel of Triton's finds the largest numbers and writes the
exponentials, another adds them up, and those who read the softmax read the exponentials, the
backward pass too. So these are there in float32, not the scores that a product wrote in 16 bits.
Scores that are in float32 anyhow are not written a second time, and for an H100 and an A100 nothing
is split.

Found by compiling two layers of attention for one H200 with jax 0.10.2, with and without a mask and
with and without remat, rows of 256 to 4096: split with 16,384 to 66,560 rows on the device, not
with 67,584 or more. A GPT-350M of 24 layers without remat, 4 sequences of 1,024, takes 18.6 GiB, by
jax 0.11.2 on an H200 as well, and was planned with 15.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.compiler_rules import reduces_rows
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of

WIDE = 4
"""Bytes of a float32."""


def split_exponentials(
    program: Sequence[InstructionValues[V]],
    root: Callable[[V], V],
    num_elements: Callable[[V], int],
    most_rows: int,
) -> set[V]:
    """The exponentials that are written.

    Args:
      program: its instructions in order.
      root: the value whose buffer one is.
      num_elements: of a device's part of a value.
      most_rows: of a softmax that is split.
    """
    largest: dict[V, V] = {}  # of every row, however it is shaped: of which scores
    widened, shifted, written = set[V](), set[V](), set[V]()
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        name, result = name_of(made), root(made.results[0])
        operands = [root(v) for v in made.operands if v is not None]
        if name == "reduce_max" and reduces_rows(made.eqn):
            row = made.eqn.invars[0].aval.shape[-1]
            if operands[0] in widened and num_elements(operands[0]) <= most_rows * row:
                largest[result] = operands[0]
        elif name in ("broadcast_in_dim", "max", "reshape", "stop_gradient"):
            of = {largest[v] for v in operands if v in largest}
            largest.update({result: of.pop()} if len(of) == 1 else {})
        elif name == "sub" and len(operands) == 2 and largest.get(operands[1]) == operands[0]:
            shifted.add(result)
        elif name == "exp" and operands[0] in shifted:
            written.add(result)
        if name == "convert_element_type":
            sizes = [x.aval.dtype.itemsize for x in (*made.eqn.invars, *made.eqn.outvars)]
            widened.update({result} if sizes[0] < WIDE <= sizes[1] else ())
        elif name in ELEMENTWISE and not widened.isdisjoint(operands):
            widened.add(result)
    return written
