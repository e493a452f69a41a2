"""Softmaxes that XLA:GPU computes in two kernels for an H200.

A softmax of few rows is split there, by XLA's own estimate of both ways
(`softmax_rewriter_triton.cc`): one kernel of Triton's finds the largest numbers and writes the
exponentials, another adds them up, and those who read the softmax read the exponentials, the
backward pass too. So these are there in float32, not the scores that a product wrote in 16 bits.
Scores that are in float32 anyhow are not written a second time, losses (`log_softmax`) are computed
as for other GPUs, and for an H100 and an A100 nothing is split.

Found by compiling two layers of attention for one H200 with jax 0.10.2, with and without a mask and
with and without remat, rows of 256 to 4096: split with 16,384 to 66,560 rows on the device, not
with 67,584 or more. A GPT-350M of 24 layers without remat, 4 sequences of 1,024, takes 18.6 GiB, by
jax 0.11.2 on an H200 as well, and was planned with 15.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of
from autopar.passes.sharding.row_exponentials import RowExponentials

NARROW = ("bfloat16", "float16")


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
    rows, exponentials, written = RowExponentials(root), set[V](), set[V]()
    narrow = set[V]()  # what is made, element by element, of products' results in 16 bits
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        name, result = name_of(made), root(made.results[0])
        operands = [root(v) for v in made.operands if v is not None]
        scores = rows.scores_of(made)
        if scores is not None and scores in narrow:
            length = made.eqn.outvars[0].aval.shape[-1]
            if num_elements(result) <= most_rows * length:
                exponentials.add(result)
        if name == "div":
            written.update(exponentials.intersection(operands[:1]))
        if name == "dot_general":
            narrow.update({result} if str(made.eqn.outvars[0].aval.dtype) in NARROW else ())
        elif name in ELEMENTWISE:
            size = num_elements(result)
            is_made = any(v in narrow and num_elements(v) == size for v in operands)
            narrow.update({result} if is_made else ())
    return written
