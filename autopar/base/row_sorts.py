"""What became of the sorts of rows by expert, for plans and for errors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.base.records import Record


@dataclasses.dataclass(frozen=True)
class RowSort(Record):
    """Rows that a step sorts by expert, the whole batch's at once, and multiplies group by group.

    Args:
      source: the user's line that sorts them.
      reason: why they are not sorted for each example by itself instead; empty: they are.
      where: the user's line of that reason.
    """

    source: str
    reason: str = ""
    where: str = ""

    @property
    def by_example(self) -> bool:
        """Whether each example's rows are sorted by themselves."""
        return not self.reason

    def __str__(self) -> str:
        if self.by_example:
            return f"sorted for each example ({self.source})"
        where = f" ({self.where})" if self.where else ""
        return (
            f"sorted over the whole batch ({self.source}), not for each example:"
            f" {self.reason}{where}"
        )


def told(sorts: Sequence[RowSort]) -> Iterator[str]:
    """One line for each of the user's lines."""
    for line, count in Counter(map(str, sorts)).items():
        yield line if count == 1 else f"{line}, {count} times"
