"""Rows that a step takes chunk by chunk, as `jax.lax.map(f, xs, batch_size=k)` does.

A microbatch has every M-th row, an equal part of each chunk, if chunks are of a multiple of M rows
and divide the batch. Other chunks mix the rows of microbatches, and a rest is taken by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.passes.graph.graph import Graph, makers_of, variables
from autopar.passes.graph.scans import ScanParts


def chunk_hint(graph: Graph, batch_sizes: Sequence[int], num_microbatches: int) -> str:
    """Which sizes of chunks would do in so many microbatches; "": no others are in the way."""
    for rows, chunk in _chunked(graph):
        for size in batch_sizes:
            is_rest = 0 <= size - rows < chunk < size
            if is_rest and (size % chunk or chunk % num_microbatches):
                whole = range(num_microbatches, size + 1, num_microbatches)
                fitting = [n for n in whole if size % n == 0]
                return (
                    f"the step takes rows in chunks of {chunk}, as by jax.lax.map(..., "
                    f"batch_size={chunk}): use chunks of {', '.join(map(str, fitting))} rows, "
                    "multiples of the number of microbatches that divide the batch"
                )
    return ""


def _chunked(graph: Graph) -> Iterator[tuple[int, int]]:
    """(rows, rows of a chunk) of what scans without a carry take in chunks."""
    eqns = graph.jaxpr.eqns
    makers = makers_of(eqns)
    for eqn in eqns:
        if eqn.primitive.name != "scan" or (scan := ScanParts.of(eqn)).num_carry:
            continue
        for stack in variables(scan.operands(eqn.invars)[2]):
            maker = eqns[makers[stack]] if stack in makers else None
            if maker is None or maker.primitive.name != "reshape" or len(stack.aval.shape) < 2:
                continue
            rows, shape = maker.invars[0].aval.shape, stack.aval.shape
            if rows and rows[0] == shape[0] * shape[1]:
                yield rows[0], shape[1]
