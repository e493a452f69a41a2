"""Kernels of GPUs that hold whole rows: a softmax reads its rows to reduce them, and again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.passes.sharding.compiler_rules import reduces_rows
from autopar.passes.sharding.held_values import HeldValues
from autopar.passes.sharding.spmd_program import Compute, Instruction, ShardedValue, reads


@dataclass(frozen=True)
class RowKernels:
    """Which values of a program are reduced in kernels that read them again.

    Args:
      reduced: the results of reductions in kernels with their readers, and the buffers that these
        read.
      scattered: buffers to which something is scattered.
      across: exponentials whose sums are no kernel's rows.
    """

    reduced: Mapping[ShardedValue, set[ShardedValue]]
    scattered: Collection[ShardedValue]
    across: Collection[ShardedValue]

    @classmethod
    def of(cls, instructions: Sequence[Instruction], held: HeldValues[ShardedValue]) -> RowKernels:
        """Those of a program."""
        computed = [x for x in instructions if isinstance(x, Compute)]
        reduced = {
            value: held.read_by(reads(x))
            for x in computed
            if reduces_rows(x.eqn)
            for value in x.results
        }
        scatters = [x for x in computed if x.eqn.primitive.name == "scatter-add"]
        return cls(reduced, {held.root(v) for x in scatters for v in x.results}, held.across)

    def read_twice(
        self,
        read: Collection[ShardedValue],
        result: ShardedValue,
        elements: Callable[[ShardedValue], int],
    ) -> set[ShardedValue]:
        """What a kernel reads again after it has reduced it, over which it does not write.

        None where something as large is scattered: XLA scatters into what else is added, which
        another kernel has computed before. Nor where sums run across the rows.
        """
        if any(v in self.across for v in read):
            return set()
        if any(v in self.scattered and elements(v) == elements(result) for v in read):
            return set()
        return {v for value in read for v in self.reduced.get(value, ())}
