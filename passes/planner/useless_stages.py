"""Why stages are not planned to their end: they do not fit, or are slower than what is known."""

from __future__ import annotations


class MisfitError(Exception):
    """A stage does not fit, and other ways are not worth looking for.

    Args:
      peak_bytes: what a device of it would hold.
    """

    def __init__(self, peak_bytes: int) -> None:
        super().__init__(peak_bytes)
        self.peak_bytes = peak_bytes


class SlowStageError(Exception):
    """A stage alone takes longer than a step does that is known."""
