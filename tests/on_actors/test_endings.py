"""Scripts that end, or end Ray, before all is done."""

import subprocess
import sys
from pathlib import Path

import pytest

import autopar

pytestmark = pytest.mark.usefixtures("no_ray")

TRAINS = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 4)
import autopar, ray
from autopar.errors import LostActorError
sys.path.insert(0, str(Path(sys.argv[1])))
from on_actors.small_step import BATCH, init, on_actors

step = on_actors(autopar.Ray(deadline=60, max_restarts=int("recovers" in sys.argv)))
state = init()
for _ in range(3):
    state, loss = step(state, BATCH)
if "leaves" in sys.argv:
    autopar.Checkpoints(sys.argv[2]).save(3, state)
    raise SystemExit(7)
jax.block_until_ready(state)
ray.shutdown()
if "again" in sys.argv:  # one of the script's own, in which there are no such actors
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
for look in (lambda: step(state, BATCH), lambda: jax.device_get(loss)):
    try:
        look()
    except LostActorError as error:
        assert "Ray was shut down" in str(error), error
    else:
        raise AssertionError("the actors are gone")
    assert ray.is_initialized() == ("again" in sys.argv)
step.shutdown()
assert ray.is_initialized() == ("again" in sys.argv)
raise SystemExit(8)
"""


def run(folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", TRAINS, str(tests), str(folder), *how],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_script_that_ends_completes_its_checkpoint(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "leaves")
    assert done.returncode == 7, done.stderr
    assert autopar.Checkpoints(tmp_path / "run").steps == (3,)


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(x, marks=pytest.mark.full) for x in ("once", "recovers", "again")),
        "recovers again",
    ],
)
def test_ray_is_shut_down_by_the_script_itself(tmp_path: Path, how: str) -> None:
    done = run(tmp_path / "run", *how.split())
    assert done.returncode == 8, done.stderr
