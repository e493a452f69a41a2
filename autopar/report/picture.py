"""`Picture`: a figure that notebooks show as what it is; importing this loads matplotlib."""

from __future__ import annotations

import io
import os
from pathlib import Path

from matplotlib.figure import Figure

from autopar.base.errors import OptionError, did_you_mean
from autopar.base.new_files import place_for

DOTS_PER_INCH = 110


class Picture(Figure):
    """A figure of `matplotlib`, made without `pyplot`, which displays itself in a notebook."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it; the file's ending (`.png`, `.svg`, `.pdf`) is its format.

        Raises:
          OptionError: there is no such format.
        """
        known, ending = self.canvas.get_supported_filetypes(), Path(path).suffix[1:]
        if ending and ending.lower() not in known:
            raise OptionError(
                f"No picture can be written to {os.fspath(path)!r}.",
                why=f"its ending is its format, which is one of {', '.join(sorted(known))}.",
                hint=did_you_mean(ending, known) or "end it in .png, .svg or .pdf.",
            )
        self.savefig(place_for(path), dpi=DOTS_PER_INCH)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=DOTS_PER_INCH)
        return out.getvalue()
