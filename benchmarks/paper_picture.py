"""Draws how models scale with the paper's clusters, from rows of `planning.py --paper --json`.

    python benchmarks/planning.py --paper --json --only "(auto|published)$" > rows.txt
    python benchmarks/paper_picture.py rows.txt docs/scaling.png

Every family of models grows with its cluster (weak scaling), so a straight line is the ideal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from autopar.report.palette import GREY, INK, MINE, QUIET

CLUSTER = "p3.16xlarge"
FAMILIES = {"gpt": "GPT", "moe": "Mixture of experts", "wide-resnet": "Wide-ResNet"}
PUBLISHED = "#e8a33d"

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows, file: Path) -> None:
    """A panel for each family of models with rows: PFLOP/s over GPUs, automatic and published."""
    of = {title: [row for row in rows if _is_of(row, family)] for family, title in FAMILIES.items()}
    of = {title: found for title, found in of.items() if found}
    size = (1 + 3.4 * len(of), 3.6)
    figure, (panels,) = plt.subplots(1, len(of), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, found) in zip(panels, of.items(), strict=True):
        _panel(axes, found, title)
    panels[0].set_ylabel("PFLOP/s, predicted", color=QUIET, fontsize=10)
    panels[0].legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="upper left")
    figure.savefig(file, dpi=160)
    plt.close(figure)


def _is_of(row: Mapping[str, Any], family: str) -> bool:
    on_paper = row["cluster"].endswith(CLUSTER) and "tflops_per_device" in row
    return on_paper and row["model"].startswith(f"{family}-")


def _panel(axes: Axes, rows: Rows, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("V100 GPUs", color=QUIET, fontsize=10)
    auto, published = (_points(rows, asked) for asked in ("auto", "published"))
    devices = sorted({count for count, _, _ in (*auto, *published)})
    if auto:
        once = auto[0][1] / auto[0][0]
        axes.plot(devices, [once * n for n in devices], "--", color=GREY, lw=1.4, label="linear")
    if published:
        x, y, _ = zip(*published, strict=True)
        axes.plot(x, y, "s", color=PUBLISHED, ms=7, label="Alpa's published plan")
    if auto:
        x, y, _ = zip(*auto, strict=True)
        axes.plot(x, y, "o-", color=MINE, lw=2, ms=5, label="automatic")
        for place, value, name in auto:
            style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "color": INK}
            axes.annotate(name, (place, value), (6, -11), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.minorticks_off()
    axes.margins(0.16, 0.12)
    axes.tick_params(colors=QUIET, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _points(rows: Rows, asked: str) -> list[tuple[int, float, str]]:
    """GPUs, PFLOP/s of all of them, the model's size; of as many GPUs the last one, the largest."""
    made = {}
    for row in rows:
        if row["asked"] == asked:
            count = int(row["cluster"].split()[0])
            size = row["model"].rpartition("-")[2]
            made[count] = (count, count * row["tflops_per_device"] / 1000, size)
    return sorted(made.values())


def main() -> None:
    """Draw the rows of a file whose last line is the benchmark's JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="what `planning.py --paper --json` printed")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found = json.loads(options.rows.read_text(encoding="utf-8").splitlines()[-1])
    draw(found["results"], options.picture)


if __name__ == "__main__":
    main()
