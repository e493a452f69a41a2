"""Compiled pieces of a step: what XLA says of each, whether or not their devices are there.

JAX compiles for devices that no process has (`jax.experimental.topologies`). What is compiled so
cannot be loaded, and no array can be on its devices, but the compiler's accounts are those of the
real ones. There, stages whose pieces are the same program share it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.runtime.ahead import compile_lowered

PIECE_MARK = "// piece "
"""How the text of a piece begins, before its name."""


def is_absent(device: jax.Device) -> bool:
    """Whether programs can be compiled for a device, and not run."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def are_absent(meshes: Iterable[Mesh]) -> bool:
    """The same for the devices of meshes."""
    return any(is_absent(mesh.devices.flat[0]) for mesh in meshes)


class CompiledPieces:
    """The compiled programs of a step, by piece and the values that are donated to it."""

    def __init__(self, variants: Mapping[tuple[str, tuple[int, ...]], Any]):
        self.variants = variants

    @property
    def by_name(self) -> dict[str, Any]:
        """The programs by their pieces' names; a second one with other donations is "F0 (2)"."""
        counts: Counter[str] = Counter()
        named = {}
        for (name, _), compiled in self.variants.items():
            counts[name] += 1
            named[name if counts[name] == 1 else f"{name} ({counts[name]})"] = compiled
        return named

    def as_text(self) -> str:
        """The compiled pieces, as XLA's text (HLO), one after the other."""
        texts = [f"{PIECE_MARK}{name}\n{x.as_text()}" for name, x in self.by_name.items()]
        return "\n".join(texts)

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece."""
        return {name: x.memory_analysis() for name, x in self.by_name.items()}

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return {name: x.cost_analysis() for name, x in self.by_name.items()}


class CompileOnce:
    """Compiles what differs: the same program under another name once for the same devices.

    Devices that are absent are all alike. What calls back into Python is compiled each time: its
    text does not say which function it calls.

    Args:
      in_turn: a context for compiling a program of this text; other processes may compile it too.
    """

    def __init__(
        self,
        in_turn: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._in_turn = in_turn
        self.known: dict[tuple[str, tuple[jax.Device, ...]], Any] = {}

    def __call__(
        self,
        function: Any,
        *shapes: Any,
        compiler_options: dict[str, str | bool] | None = None,
        **settings: Any,
    ) -> Any:
        """As `compile_ahead`."""
        lowered = jax.jit(function, **settings).lower(*shapes)
        text = program_text(lowered, function.__name__)
        told = f"{text}\n{sorted((compiler_options or {}).items())}"
        key = hashlib.sha256(told.encode()).hexdigest(), _devices(settings)
        made = self.known.get(key)
        if made is None or "callback" in text:
            with self._in_turn(text):
                made = compile_lowered(lowered, function, shapes, compiler_options, settings)
            self.known[key] = made
        return made


def _devices(settings: Mapping[str, Any]) -> tuple[jax.Device, ...]:
    shardings = jax.tree.leaves([settings.get("in_shardings"), settings.get("out_shardings")])
    devices = next((tuple(x.mesh.devices.flat) for x in shardings if hasattr(x, "mesh")), ())
    return () if any(map(is_absent, devices)) else devices


def program_text(lowered: jax.stages.Lowered, name: str) -> str:
    """A lowered program without the name of the function that it was made from."""
    return str(lowered.as_text()).replace(f"@jit_{name}", "@jit_program", 1)
