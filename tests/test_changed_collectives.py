"""The pass that changed a program's collectives is found in what XLA writes after every pass."""

from __future__ import annotations

from pathlib import Path

from autopar.base.compiled_records import CollectiveChange
from autopar.runtime.verification.changed_collectives import before_passes, changes

GATHER = "  %gather.{0} = bf16[64,8]{{1,0}} all-gather(%p), replica_groups={{{{0,1,2,3}}}}"
PROGRAM = """HloModule jit_step

ENTRY %main (p: bf16[16,8]) -> bf16[64,8] {{
  %p = bf16[16,8]{{1,0}} parameter(0)
{0}
  ROOT %sum = bf16[64,8]{{1,0}} add(%gather.1, %gather.1)
}}
"""


def program(*gathers: int) -> str:
    return PROGRAM.format("\n".join(GATHER.format(number) for number in gathers))


def test_the_pass_that_merges_equal_gathers_is_named(tmp_path: Path) -> None:
    stem = "module_0001.jit_step"
    (tmp_path / f"{stem}.before_optimizations.txt").write_text(program(1, 2))
    steps = [("pipeline-start", (1, 2)), ("dce", (1, 2)), ("cse", (1,)), ("fusion", (1,))]
    for number, (name, gathers) in enumerate(steps):
        path = tmp_path / f"{stem}.{number:04d}.simplification.after_{name}.before_next.txt"
        path.write_text(program(*gathers))
    (tmp_path / "module_0000.jit_zeros.0001.x.after_cse.before_dce.txt").write_text("HloModule z")

    assert before_passes(tmp_path, (4,), ("x",)) == {("all-gather", ("x",), 1): 2 * 1024}
    (change,) = changes(tmp_path, (4,), ("x",))
    assert change == CollectiveChange("cse", "all-gather", ("x",), 1, 2 * 1024, 1024)
    assert str(change) == "all-gather over x: 2 KiB became 1 KiB in cse"


def test_nothing_written_is_no_change(tmp_path: Path) -> None:
    assert before_passes(tmp_path, (4,), ("x",)) is None
    assert changes(tmp_path, (4,), ("x",)) == ()
