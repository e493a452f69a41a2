"""Softmaxes that XLA:GPU computes across the rows that a product wrote, not along them.

Attention with several query heads for a key head multiplies queries and keys into scores whose last
dimension is the group (`btkge,bske->bkstg`), and transposes them. Elementwise operations follow the
order of the product, so that the softmax adds up what is not side by side in memory: there the
kernel that adds up the exponentials writes them as well, and all who read the softmax read these,
also for the gradient. What the exponentials are made of is there beside them if it is read again,
as the scores are below a tanh (soft-capped logits).

Found by compiling three layers of grouped attention for an H100 (jax 0.10.2), products in float32,
with remat, in a scan and unrolled: with soft-capped scores 3.86 and 7.94 GiB, 2.85 and 5.93 if
exponentials were computed where they are read; unrolled without them 4.94, which was 5.93 so.
Products in 16 bits, whose scores are cast, are for `turned_products.py` to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.epilogues import InstructionValues, name_of
from autopar.passes.sharding.row_exponentials import RowExponentials
from autopar.passes.sharding.turned_products import FEWEST_DIMS, Order

WIDE = 4
"""Bytes of a float32."""


def column_exponentials(
    program: Sequence[InstructionValues[int]], root: Callable[[int], int]
) -> set[int]:
    """The exponentials that are written.

    Args:
      program: its instructions in order.
      root: the value whose buffer one is.
    """
    orders: dict[int, Order] = {}  # dimensions from the outermost to the innermost
    known = set[int]()  # of float32, or after a function: not computed again
    rows, written = RowExponentials(root), set[int]()
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        name, (result,), aval = name_of(made), made.results, made.eqn.outvars[0].aval
        if name == "dot_general" and len(aval.shape) >= FEWEST_DIMS:
            orders[result] = tuple(range(len(aval.shape)))
            known.update({result} if aval.dtype.itemsize >= WIDE else ())
        elif name == "transpose" and (operand := made.operands[0]) in orders:
            places = tuple(made.eqn.params["permutation"])
            orders[result] = tuple(map(places.index, orders[operand]))
            known.update({result} if operand in known else ())
        elif name in ELEMENTWISE:
            found = [v for v in made.operands if v in orders]
            orders.update({result: orders[found[0]]} if found else {})
            known.update({result} if found and (name == "tanh" or found[0] in known) else ())
        if rows.scores_of(made) is not None and result in known:
            inner = [dim for dim in orders[result] if aval.shape[dim] > 1]
            written.update({root(result)} if inner[-1:] != [aval.ndim - 1] else ())
    return written
