"""Tensors as tiles, cut as a plan cuts them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.base.plan_records import PlanRecord
from autopar.report.palette import AXIS_COLORS, INK, MINE, OTHERS, QUIET, WHOLE
from autopar.report.path_folding import relative_path, shortened
from autopar.report.state_parts import input_categories
from autopar.report.summaries import TensorGroup, fold_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 5
_MAX_ROWS = 4
_FEW = 2
_HEADING = 0.3  # of a row's height
_CUT: dict[str, Any] = {"linewidth": 1.4, "solid_capstyle": "butt"}

# Tiles. Coordinates are in cells: one unit is the width of a column and the height of a row.


def tiles_height(plan: PlanRecord) -> float:
    """How many rows high the tiles of a plan are, with their headings; one at least."""
    bands = _bands(plan)
    headings = sum(any(title for title, _, _ in band) for band in bands)
    return max(len(bands) + _HEADING * headings, 1.0)


def draw_tiles(axes: Axes, plan: PlanRecord) -> None:
    """Draws the state and the batch of a plan as rows of tiles, with a legend above them."""
    bands = _bands(plan)
    axes.set_xlim(0, _COLUMNS)
    axes.set_ylim(tiles_height(plan), 0)
    axes.axis("off")
    _draw_legend(axes, plan)
    shown = [group for band in bands for _, groups, _ in band for group in groups]
    largest = max((group.tensor.bytes for group in shown), default=1)
    top = 0.0
    for band in bands:
        column = 0
        if any(title for title, _, _ in band):
            top += _HEADING
        for title, groups, category in band:
            axes.text(column + 0.06, top - 0.1, title, fontsize=12.5, weight="bold", color=INK)
            for group in groups:
                _draw_tile(axes, plan, group, category, column, top, largest)
                column += 1
        top += 1


_Segment = tuple[str, list[TensorGroup], str]
"""A heading (empty in a category's second row), the tensors below it, and their category."""


def _bands(plan: PlanRecord) -> list[list[_Segment]]:
    """Rows of tiles. Categories of few tensors come last and share the last rows."""
    category = input_categories(plan)
    members: dict[str, list[TensorGroup]] = {}
    for group in fold_tensors(plan.inputs, [stage.mesh for stage in plan.stages]):
        if group.tensor.shape and group.tensor.role in ("state", "batch"):
            members.setdefault(category[group.tensor.path], []).append(group)
    names = sorted(members, key=lambda name: len(members[name]) <= _FEW)
    places = _places([len(members[name]) for name in names])
    bands: list[list[_Segment]] = []
    free = 0
    for name, num_places in zip(names, places, strict=True):
        groups = members[name]
        largest = {id(g) for g in sorted(groups, key=lambda g: -g.bytes)[:num_places]}
        shown = [group for group in groups if id(group) in largest]
        hidden = len(groups) - len(shown)
        kinds = "1 smaller kind" if hidden == 1 else f"{hidden} smaller kinds"
        heading = f"{name} (and {kinds})" if hidden else name
        if len(shown) > free:
            free = 0
        while shown:
            if free == 0:
                bands.append([])
                free = _COLUMNS
            row, shown = shown[:free], shown[free:]
            bands[-1].append((heading, row, name))
            free -= len(row)
            heading = ""
    return bands[:_MAX_ROWS]


def _places(counts: Sequence[int]) -> list[int]:
    """How many tiles each category gets: one row, and more rows in turn while there is room."""
    large = [i for i, count in enumerate(counts) if count > _FEW]
    places = [min(count, _COLUMNS) for count in counts]
    few = sum(counts) - sum(counts[i] for i in large)
    spare = _MAX_ROWS - len(large) - (0 if large else math.ceil(few / _COLUMNS))
    while spare > 0:
        wanting = [i for i in large if counts[i] > places[i]]
        if not wanting:
            break
        i = min(wanting, key=lambda i: places[i])
        places[i] = min(counts[i], places[i] + _COLUMNS)
        spare -= 1
    if large and few < _COLUMNS and places[large[-1]] % _COLUMNS == 0 and spare == 0:
        places[large[-1]] -= few
    return places


def _draw_tile(
    axes: Axes,
    plan: PlanRecord,
    group: TensorGroup,
    category: str,
    column: int,
    top: float,
    largest: int,
) -> None:
    from matplotlib.patches import Rectangle

    tensor = group.tensor
    stage = plan.stages[tensor.stages[0]]
    sizes = dict(zip(stage.axis_names, stage.logical_mesh, strict=True))
    colors = _axis_colors(plan)
    *outer, last = tensor.shape
    row_axes = [axis for dim in tensor.spec[:-1] for axis in dim]
    column_axes = list(tensor.spec[-1])
    width, height = _tile_size(math.prod(outer), last, tensor.bytes / largest, flat=not outer)
    left, upper = column + 0.5 - width / 2, top + 0.33 - height / 2
    num_rows = math.prod(sizes[axis] for axis in row_axes)
    num_columns = math.prod(sizes[axis] for axis in column_axes)
    is_cut = num_rows * num_columns > 1
    fill = OTHERS if is_cut else WHOLE
    axes.add_patch(Rectangle((left, upper), width, height, facecolor=fill, edgecolor="none"))
    if is_cut:
        part = (width / num_columns, height / num_rows)
        axes.add_patch(Rectangle((left, upper), *part, facecolor=MINE, edgecolor="none"))
    for i, color in _cuts(row_axes, sizes, colors):
        y = upper + height * i / num_rows
        axes.plot([left, left + width], [y, y], color=color, **_CUT)
    for i, color in _cuts(column_axes, sizes, colors):
        x = left + width * i / num_columns
        axes.plot([x, x], [upper, upper + height], color=color, **_CUT)
    frame = Rectangle((left, upper), width, height, fill=False, edgecolor=QUIET, linewidth=0.8)
    axes.add_patch(frame)
    lines = _name_lines(group.path, category)
    times = f", {group.count} of them" if group.count > 1 else ""
    times += ", host" * (group.tensor.memory == "host")
    dims = zip(tensor.shape, tensor.spec, strict=True)
    shape = " x ".join("/".join([str(size), *dim]) for size, dim in dims)
    below: dict[str, Any] = {"ha": "center", "va": "top", "textcoords": "offset points"}
    for i, line in enumerate([*lines, f"{shape}{times}"]):
        color, size = (QUIET, 8.2) if i == len(lines) else (INK, 8.8)
        offset = (0, -12.5 * i)
        axes.annotate(line, (column + 0.5, top + 0.66), offset, color=color, fontsize=size, **below)


def _tile_size(rows: int, columns: int, share: float, *, flat: bool) -> tuple[float, float]:
    """Width and height of a tile: the true proportions, much softened so that labels fit below."""
    scale = max(share**0.1, 0.45)
    if flat:
        return 0.82 * scale, 0.08
    aspect = min(max((columns / rows) ** 0.4, 0.45), 2.2)
    width = min(0.82, 0.58 * aspect)
    return width * scale, min(0.58, width / aspect) * scale


def _cuts(
    axes: Sequence[str], sizes: Mapping[str, int], colors: Mapping[str, str]
) -> list[tuple[int, str]]:
    """Where cuts run, counted in parts, each in the colour of the outermost axis there."""
    parts = math.prod(sizes[axis] for axis in axes)
    cuts: dict[int, str] = {}
    inner = parts
    for axis in axes:
        inner //= sizes[axis]
        for i in range(inner, parts, inner):
            cuts.setdefault(i, colors[axis])
    return sorted(cuts.items())


def _name_lines(path: str, category: str, width: int = 26) -> list[str]:
    """A path in at most two lines; what does not fit is left out in its middle."""
    whole = relative_path(path, category)
    names = whole.split("/")
    if len(whole) <= width or len(names) == 1:
        return [shortened(whole, width)]
    splits = (
        (f"{'/'.join(names[:i])}/", "/".join(names[i:])) for i in range(len(names) - 1, 0, -1)
    )
    fitting = (lines for lines in splits if max(map(len, lines)) <= width)
    best = next(fitting, (f"{'/'.join(names[:-1])}/", names[-1]))
    return [shortened(line, width) for line in best]


def _draw_legend(axes: Axes, plan: PlanRecord) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colors = _axis_colors(plan)
    device = "device 0" if not plan.is_pipeline else "a mesh's first device"
    handles: list[Patch | Line2D] = [
        Patch(facecolor=MINE, label=f"the part on {device}"),
        Patch(facecolor=OTHERS, label="parts on other devices"),
        Patch(facecolor=WHOLE, label="whole on every device"),
    ]
    ways: dict[str, dict[str, None]] = {}
    for stage in plan.stages:
        for name, size in zip(stage.axis_names, stage.logical_mesh, strict=True):
            ways.setdefault(name, {})[str(size)] = None
    for name, sizes in ways.items():
        if list(sizes) == ["1"]:
            continue
        label = f"cut along {name} ({' or '.join(sizes)} ways)"
        handles.append(Line2D([], [], color=colors[name], linewidth=2, label=label))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        handlelength=1.1,
        columnspacing=1.6,
        borderaxespad=0.1,
        labelcolor=INK,
    )


def _axis_colors(plan: PlanRecord) -> dict[str, str]:
    names = dict.fromkeys(name for stage in plan.stages for name in stage.axis_names)
    return dict(zip(names, AXIS_COLORS, strict=False))
