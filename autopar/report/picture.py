"""`Picture`: a figure that notebooks show as what it is; importing this loads matplotlib."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

DOTS_PER_INCH = 110


class Picture(Figure):
    """A figure of `matplotlib`, made without `pyplot`, which displays itself in a notebook."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=DOTS_PER_INCH)
        return out.getvalue()
