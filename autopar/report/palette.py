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
TASK_COLORS = ("#3b7dd8", "#7fb069", "#e8a33d", "#8e6bbf", "#4fa3a5")
WAITING = "#eef1f4"
MESHES = ("#3b7dd8", "#c95d63", "#e8a33d", "#4fa3a5", "#8e6bbf", "#7fb069", "#9aa5b1", "#b3261e")
