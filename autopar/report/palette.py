"""The colours of pictures."""

AXIS_COLORS = ("#b3261e", "#00695c", "#6a1b9a")
INK, QUIET, GREY = "#1f2933", "#6b7280", "#cbd2d9"
MINE, OTHERS, WHOLE = "#3b7dd8", "#d6e4f7", "#f3d9a4"
WAITING = "#eef1f4"
APART = {"F": "#0072b2", "B": "#e69f00", "W": "#009e73", "once": "#cc79a7", "move": "#56b4e9"}
"""Kinds of tasks in colours that colour-blind readers tell apart (Okabe and Ito, "Color Universal
Design", 2008), on light and dark."""
TASK_COLORS = tuple(APART.values())
APART_PARTS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
PARTS = APART_PARTS
MESHES = (*APART_PARTS, INK)
KINDS = {
    "all-reduce": "#d55e00",
    "reduce-scatter": "#e69f00",
    "all-gather": "#0072b2",
    "all-to-all": "#cc79a7",
    "collective-permute": "#009e73",
}
DARK = (MINE, "#0072b2", "#009e73", "#d55e00")
"""Those on which text is white."""
IDLE = "var(--idle)"
