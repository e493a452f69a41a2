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
Of products in 16 bits it is so after a tanh; else `turned_products.py` tells what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.sharding.epilogues import InstructionValues, name_of
from autopar.passes.sharding.row_exponentials import RowExponentials
from autopar.passes.sharding.turned_products import is_short, orders_of


def column_exponentials(
    program: Sequence[InstructionValues[int]], root: Callable[[int], int]
) -> set[int]:
    """The exponentials that are written.

    Args:
      program: its instructions in order.
      root: the value whose buffer one is.
    """
    orders, rows, written = orders_of(program), RowExponentials(root), set[int]()
    functions = set[int]()  # a tanh of what a product wrote, and what is made of it one by one
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        scores, (result,) = rows.scores_of(made), made.results
        if result not in orders:
            continue
        product, dims = orders[result]
        own = (v for v in made.operands if v in functions)
        if name_of(made) == "tanh" or any(orders[v].product == product for v in own):
            functions.add(result)
        if scores is None:
            continue
        aval = made.eqn.outvars[0].aval
        inner = [dim for dim in dims if aval.shape[dim] > 1]
        is_across = inner[-1:] != [aval.ndim - 1]
        if is_across and (not is_short(program[product]) or result in functions):
            written.add(root(result))
    return written
