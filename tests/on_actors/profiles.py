"""What must hold of any profile of a pipeline on actors."""

from __future__ import annotations

from autopar.passes.pipeline.instructions import Free
from autopar.profile import Profile


def check_profile(profile: Profile) -> None:
    program = profile.timeline.program
    assert set(profile.seconds) == set(program.order)
    for mesh, instructions in enumerate(program.meshes):
        for index, instruction in enumerate(instructions):
            if not isinstance(instruction, Free):
                assert profile.seconds[mesh, index] > 0, instruction
    assert len(profile.timeline.events) == len(program.order)
    assert profile.step_seconds > 0
    own = profile.on_own_devices
    assert max(own.busy) <= own.step_seconds
    assert "F0" in str(profile) and "B1" in str(profile)
