"""The colours of pictures."""

AXIS_COLORS = ("#b3261e", "#00695c", "#6a1b9a")
INK, QUIET, GREY = "#1f2933", "#6b7280", "#cbd2d9"
MINE, OTHERS, WHOLE = "#3b7dd8", "#d6e4f7", "#f3d9a4"
PARTS = ("#3b7dd8", "#7fb069", "#e8a33d", "#8e6bbf", "#4fa3a5", "#c95d63", "#9aa5b1")
KINDS = {
    "all-reduce": "#c95d63",
    "reduce-scatter": "#e8a33d",
    "all-gather": "#3b7dd8",
    "all-to-all": "#8e6bbf",
    "collective-permute": "#4fa3a5",
}
WAITING = "#eef1f4"
MESHES = ("#3b7dd8", "#c95d63", "#e8a33d", "#4fa3a5", "#8e6bbf", "#7fb069", "#9aa5b1", "#b3261e")
APART = {"F": "#0072b2", "B": "#e69f00", "W": "#009e73", "once": "#cc79a7", "move": "#56b4e9"}
"""Kinds of tasks in colours that colour-blind readers tell apart (Okabe and Ito, "Color Universal
Design", 2008), on light and dark."""
TASK_COLORS = tuple(APART.values())
APART_PARTS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
IDLE = "var(--idle)"
