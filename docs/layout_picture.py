"""Draws docs/layout.png: the folders of the code on their floors, with every import as an arrow.

python docs/layout_picture.py [file]
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import layout  # noqa: E402

QUIET, PALE, UP = "#6b7280", "#dbe2ea", "#b3261e"
COLORS = {
    "autopar": "#3b7dd8",
    "autopar.runtime": "#8e6bbf",
    "autopar.passes": "#7fb069",
    "autopar.base": "#9aa5b1",
    "": "#e8a33d",
}
"""Of whole subpackages; "" is what shows plans and holds arrays."""
WIDTH, HEIGHT, ROW, COLUMN = 1.9, 0.58, 1.22, 2.4


def places() -> dict[str, tuple[float, float]]:
    """Where the middle of each room is: by floor, and near what it imports and what imports it."""
    arrows = layout.room_arrows()
    by_floor: dict[int, list[str]] = defaultdict(list)
    imported = {other for others in arrows.values() for other in others}
    for room, floor in sorted(layout.floors().items()):
        if arrows[room] or room in imported:  # the others hold data alone
            by_floor[floor].append(room)
    across = {
        room: float(i - (len(rooms) - 1) / 2)
        for rooms in by_floor.values()
        for i, room in enumerate(rooms)
    }
    linked: dict[str, set[str]] = {room: set(arrows[room]) for room in across}
    for room, others in arrows.items():
        for other in others:
            linked[other].add(room)
    for _ in range(20):
        for rooms in by_floor.values():
            wanted = {
                room: sum(across[other] for other in linked[room]) / max(len(linked[room]), 1)
                for room in rooms
            }
            for i, room in enumerate(sorted(rooms, key=lambda room: (wanted[room], room))):
                across[room] = float(i - (len(rooms) - 1) / 2)
    return {room: (COLUMN * across[room], ROW * layout.floors()[room]) for room in across}


def is_direct(room: str, other: str) -> bool:
    """Whether a room reaches another in no other way than by importing it."""
    arrows = layout.room_arrows()
    seen, waiting = set(), [step for step in arrows[room] if step != other]
    while waiting:
        step = waiting.pop()
        if step == other:
            return False
        if step not in seen:
            seen.add(step)
            waiting += arrows[step]
    return True


def color_of(room: str) -> str:
    """The colour of the subpackage that a room belongs to."""
    names = [n for n in COLORS if n and room.startswith(n) and (n != layout.FACE or room == n)]
    return COLORS[max(names, key=len, default="")]


def shifted(x: float, other: float) -> float:
    """Where at the edge of a box an arrow begins or ends: on the side from which it comes."""
    return x + max(min(0.16 * (other - x), 0.4 * WIDTH), -0.4 * WIDTH)


def draw(axes: Axes) -> None:
    """Draws the rooms, and arrows: dark where one is the only way, pale where others lead there."""
    middle = places()
    lines, files = Counter[str](), Counter[str]()
    for module in layout.modules():
        lines[layout.room(module)] += layout.num_lines(module)
        files[layout.room(module)] += 1
    floors = layout.floors()
    for room, others in layout.room_arrows().items():
        for other in others:
            (x, y), (to_x, to_y) = middle[room], middle[other]
            direct, up = is_direct(room, other), floors[other] >= floors[room]
            far = floors[room] - floors[other] > 1 and abs(x - to_x) < 0.5
            axes.add_patch(
                FancyArrowPatch(
                    (shifted(x, to_x), y - HEIGHT / 2),
                    (shifted(to_x, x), to_y + HEIGHT / 2),
                    connectionstyle=f"arc3,rad={0.22 if far else 0.0}",
                    arrowstyle="-|>,head_length=5,head_width=2.2",
                    color=UP if up else QUIET if direct else PALE,
                    linewidth=1.5 if direct or up else 0.7,
                    shrinkA=0,
                    shrinkB=1,
                    zorder=2 if direct or up else 1,
                )
            )
    for room, (x, y) in middle.items():
        box = FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.09",
            facecolor=color_of(room),
            edgecolor="white",
            linewidth=2,
            zorder=3,
        )
        axes.add_patch(box)
        name = room.removeprefix("autopar.").replace(".", "/")
        name = "autopar (the face)" if room == layout.FACE else name
        size = f"{files[room]} file{'s' * (files[room] > 1)}, {lines[room]:,} lines"
        axes.text(x, y + 0.1, name, ha="center", va="center", color="white", zorder=4,
                  fontsize=10.5, weight="bold")  # fmt: skip
        axes.text(x, y - 0.13, size, ha="center", va="center", color="white", zorder=4, fontsize=8)
    left = min(x for x, _ in middle.values()) - WIDTH / 2 - 0.35
    for floor in sorted(set(floors.values())):
        axes.text(left, ROW * floor, str(floor), ha="right", va="center", color=QUIET, fontsize=12)
    axes.text(left, ROW * (max(floors.values()) + 0.55), "floor", ha="right", color=QUIET)
    right = max(x for x, _ in middle.values()) + WIDTH / 2
    axes.set_xlim(left - 0.5, right + 0.2)
    axes.set_ylim(ROW - 0.5, ROW * (max(floors.values()) + 0.8))
    axes.set_aspect("equal")
    axes.axis("off")


figure = Figure(figsize=(14, 14.5 / 12 * max(layout.floors().values())), facecolor="white")
draw(figure.add_axes((0.01, 0.01, 0.98, 0.98)))
figure.savefig(
    sys.argv[1] if len(sys.argv) > 1 else HERE / "layout.png", bbox_inches="tight", dpi=90
)
