"""The pictures that the examples save."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, FAINT = "#1f2933", "#6b7280", "#e5e7eb"
BLUE, ORANGE, RED = "#3b7dd8", "#d9730d", "#c95d63"


def draw_losses(
    path: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]], bigram: float
) -> None:
    """Draws bits per byte over the steps; the bigram model is the line to get under.

    Args:
      path: of the picture.
      losses: of each step on its batch, nats per byte.
      validation: (step, bits per byte).
      bigram: bits per byte.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    bits = np.asarray(losses) / np.log(2)
    half = max(1, len(bits) // 50)
    smooth = [bits[max(0, i - half) : i + half + 1].mean() for i in range(len(bits))]
    steps = np.arange(1, len(bits) + 1)

    axes.axhline(bigram, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2)
    _note(axes, f"bigram model {bigram:.2f}", (steps[-1], bigram), (0, 5), GREY, ha="right")
    axes.plot(steps, bits, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=BLUE, linewidth=1.8, label="training, with dropout")
    at, values = zip(*validation, strict=True)
    axes.plot(at, values, "o-", color=ORANGE, markersize=5, label="validation")
    _note(axes, f"{values[-1]:.2f}", (at[-1], values[-1]), (0, -16), ORANGE, ha="center")

    axes.set_ylim(max(0.0, min(*smooth, *values, bigram) - 0.6), None)
    axes.set_xlim(0, steps[-1] * 1.03)
    axes.set_xlabel("step", color=GREY)
    axes.set_title("bits per byte", loc="left", color=INK, weight="bold")
    axes.grid(axis="y", color=FAINT)
    axes.legend(frameon=False)
    _clean(axes)
    figure.savefig(path)


def draw_predictions(
    path: Path, images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray
) -> None:
    """Draws the confusion matrix, and the images of which the classifier was least sure.

    Args:
      path: of the picture.
      images: [rows, height, width, 1].
      labels: [rows].
      probabilities: [rows, classes].
    """
    figure = Figure(figsize=(10, 5), layout="constrained", dpi=150)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.05))[0]
    predicted = probabilities.argmax(1)
    classes = probabilities.shape[1]
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (labels, predicted), 1)

    axes = left.subplots()
    is_diagonal = np.eye(classes, dtype=bool)
    axes.imshow(np.where(is_diagonal, counts, np.nan), cmap="Blues", vmin=0, vmax=2 * counts.max())
    for true, guess in np.argwhere(counts):
        color = INK if true == guess else RED
        axes.text(guess, true, counts[true, guess], ha="center", va="center", color=color)
    axes.set_xticks(range(classes))
    axes.set_yticks(range(classes))
    axes.set_xlabel("predicted", color=GREY)
    axes.set_ylabel("true", color=GREY)
    share = np.mean(predicted == labels)
    axes.set_title(f"test accuracy {share:.2%}", loc="left", color=INK, weight="bold")
    _clean(axes)

    confidence = probabilities[np.arange(len(labels)), labels]
    figure_axes = right.subplots(5, 6).ravel()
    right.suptitle("least sure: true label, and what it was taken for", color=INK, weight="bold")
    for cell, row in zip(figure_axes, np.argsort(confidence), strict=False):
        cell.imshow(images[row, :, :, 0], cmap="gray_r")
        is_right = predicted[row] == labels[row]
        cell.set_title(
            f"{labels[row]}" if is_right else f"{labels[row]}, not {predicted[row]}",
            fontsize=9,
            color=INK if is_right else RED,
        )
        cell.set_xticks([])
        cell.set_yticks([])
        cell.spines[:].set_color(FAINT)
    figure.savefig(path)


def _note(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], color: str, ha: str
) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", color=color, ha=ha, weight="bold")


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(color=FAINT, labelcolor=GREY)
