"""What to call plans that were considered beside each other: by what tells them apart."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from autopar.base.cluster import axis_names
from autopar.base.plan_records import Candidate
from autopar.base.units import format_mesh, format_microbatches

_HELD = "\N{NO-BREAK SPACE}"
_UNSAID = ("", "1 stage")
_STAGES = re.compile(r"\d+ stages")


def label_candidates(candidates: Sequence[Candidate], width: int) -> tuple[str, list[str]]:
    """What all have in common, and for each what the others do not have.

    Args:
      candidates: that are shown beside each other. One alone is called all that is known of it.
      width: of a line of a label, which has two at most.

    >>> meshes = (8,), (4, 2)
    >>> label_candidates([Candidate("zero1", mesh, 4, 1.0, 1) for mesh in meshes], width=20)
    ('zero1, 4 microbatches', ['x=8', 'x=4, y=2'])
    """
    features = [_features(item) for item in candidates]
    notes = [_notes(item) for item in candidates]
    is_same = [len(set(values)) == 1 for values in zip(*features, strict=True)]
    everywhere = set(notes[0]).intersection(*notes[1:])
    if len(candidates) == 1:
        is_same, everywhere = [False] * len(is_same), set()
    common = [value for value, same in zip(features[0], is_same, strict=True) if same]
    common += [note for note in notes[0] if note in everywhere]
    labels = []
    for values, own in zip(features, notes, strict=True):
        parts = [value for value, same in zip(values, is_same, strict=True) if not same]
        parts += [note for note in own if note not in everywhere]
        if len(candidates) == 1:
            parts = [part for part in parts if part not in _UNSAID]
        labels.append(_lines(list(filter(None, parts)) or ["as it is"], width))
    return ", ".join(part for part in common if part not in _UNSAID), labels


def _lines(parts: Sequence[str], width: int) -> str:
    """Two lines at most, which end after a part."""
    text = ", ".join(part.replace(" ", _HELD) for part in parts)
    lines = textwrap.wrap(text, width, max_lines=2, placeholder=" ..", break_on_hyphens=False)
    return "\n".join(lines).replace(_HELD, " ")


def _features(item: Candidate) -> tuple[str, ...]:
    """What every candidate has, the same kind at the same place."""
    stages, schedule = _pipeline(item)
    mesh = format_mesh(item.logical_mesh, axis_names(item.logical_mesh))
    return item.method, stages, schedule, mesh, format_microbatches(item.num_microbatches)


def _pipeline(item: Candidate) -> tuple[str, str]:
    """How many stages it has, and its schedule."""
    stages, _, rest = item.note.partition(", ")
    return (stages, rest.split(", ")[0]) if _STAGES.fullmatch(stages) else ("1 stage", "")


def _notes(item: Candidate) -> list[str]:
    """What else is said of it; whether it fits is told by its bytes."""
    known = (*_pipeline(item), "", "exceeds the memory limit")
    return [note for note in item.note.split(", ") if note not in known]
