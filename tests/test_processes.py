"""Processes that compute together run the same program, or say that they do not."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import signal
import sys

import jax

port, own, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, own, initialization_timeout=60)

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import autopar
from autopar.runtime import agreed_checks, same_plan


def step(w, x, rate=0.01):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - rate * gradient, loss


def other(w, x):
    return step(w, x, rate=0.01 * (1 + own))


w, x = np.ones((8, 4), np.float32), np.arange(64, dtype=np.float32).reshape(8, 8) / 64
compiled = autopar.compile(step, w, x, method="zero3")
state, loss = compiled(*compiled(w, x)[:1], x)
print("loss", float(loss), float(jax.jit(step)(*jax.jit(step)(w, x)[:1], x)[1]), flush=True)
born = compiled.initialize(lambda: jnp.arange(32.0).reshape(8, 4))
assert not born.is_fully_addressable
whole = compiled.gather(born)
print("gathered", float(np.asarray(whole).sum()), float(compiled.apply(jnp.sum, born)), flush=True)
with autopar.interruptible() as interrupted:
    done = 0
    while done < 50:
        state, loss = compiled(state, x)
        done += 1
        if own == 1 and done == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if interrupted:
            break
    heard = interrupted.signal
print("ended after", done, bool(interrupted), heard is not None, flush=True)
try:
    autopar.Checkpoints(os.path.join(folder, "ours")).save(1, state)
except autopar.errors.CheckpointError as error:
    print(*str(error).split(), flush=True)
with ocp.CheckpointManager(os.path.join(folder, "orbax")) as manager:
    manager.save(done, args=ocp.args.StandardSave({"state": state}))
    manager.wait_until_finished()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"state": state})
    restored = manager.restore(done, args=ocp.args.StandardRestore(like))["state"]
print("restored", restored.sharding == state.sharding, bool(jnp.all(restored == state)))


def refused(step, **options):
    try:
        autopar.compile(step, w, x, **options)
    except autopar.errors.PlanMismatchError as error:
        print(*str(error).split(), flush=True)


refused(other)
refused(step, method=("data", "zero3")[own])
followed = autopar.parallelize(step, method="zero3")
state, _ = followed(w, x)
try:  # batches of other sizes, which follow the known plan
    followed(state, x[: 4 + 2 * own])
except autopar.errors.PlanMismatchError as error:
    print("followed:", *str(error).split(), flush=True)
train = autopar.parallelize(step, method="zero3")
evaluate = autopar.follow(train, lambda w, x: jnp.mean((x @ w) ** 2))
state = plain = w
for batch in train.prefetch(x + i for i in range(3)):
    state, _ = train(state, batch)
for i in range(3):
    plain, _ = jax.jit(step)(plain, x + i)
batch, *_ = train.prefetch([x])
assert isinstance(batch, jax.Array) and not batch.is_fully_addressable
print("evaluated", float(evaluate(state, x)), float(jnp.mean((x @ plain) ** 2)), flush=True)
try:
    autopar.compile(step, w, x, stages=2)
except autopar.errors.DeviceError as error:
    print(*str(error).split(), flush=True)
if own == 0:  # the other one does not
    same_plan.DEADLINE_SECONDS = 0.5
    refused(step)
    agreed_checks.DEADLINE_SECONDS = 0.5
    with autopar.interruptible() as interrupted:
        try:
            interrupted.is_set()
        except autopar.errors.DeviceError as error:
            print(*str(error).split(), flush=True)
"""


def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, port, str(own), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for own in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0].splitlines() for process in started]
    finally:
        for process in started:
            process.kill()
    for own, lines in enumerate(said):
        numbers = next(line.split()[1:] for line in lines if line.startswith("loss"))
        assert abs(float(numbers[0]) - float(numbers[1])) < 1e-5
        pair = f"Processes {own} and {1 - own} are not about to run the same:"
        assert any(f"{pair} another program." in line for line in lines)
        assert any(f"followed: {pair} another program." in line for line in lines)
        assert any(f"{pair} another option method." in line for line in lines)
        numbers = next(line.split()[1:] for line in lines if line.startswith("evaluated"))
        assert abs(float(numbers[0]) - float(numbers[1])) < 1e-5
        assert "gathered 496.0 496.0" in lines
        assert f"ended after 7 True {own == 1}" in lines, "whichever of them hears the signal"
        assert any("lies on devices of other processes." in line for line in lines)
        assert "restored True True" in lines
        assert any("2 processes." in line and "runtime='ray'" in line for line in lines)
    assert any("Process 1 has not come to where process 0 is." in line for line in said[0])
    assert any("have not come to check 1 of interruptible." in line for line in said[0])
