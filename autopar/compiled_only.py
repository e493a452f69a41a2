"""`CompiledOnly`: a step compiled for devices that are not there, for what its compiler says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from autopar.base.errors import DeviceError
from autopar.base.user_code import shortens
from autopar.executable import Executable
from autopar.passes.planner.compiler import Compiled
from autopar.runtime.compiled_pieces import is_absent
from autopar.runtime.local import LocalProgram


class CompiledOnly(Executable):
    """A step that is compiled for absent devices; `autopar.compile(..., devices=...)` makes it.

    It has `plan`, `memory()`, `hlo()`, `cost()` and the shardings, and cannot run. What the
    function closed over is there as shapes. Stages whose pieces are the same are compiled once.
    """

    def _load(self, fn: Callable[..., Any], compiled: Compiled) -> Any:
        return LocalProgram(compiled.runnable, self._devices)

    def _constant(self, value: Any, sharding: Any) -> Any:
        typed = jax.typeof(value)
        return jax.ShapeDtypeStruct(
            typed.shape, typed.dtype, sharding=sharding, weak_type=typed.weak_type
        )

    def _refuse(self, what: str) -> NoReturn:
        assert self._devices is not None
        raise DeviceError(
            f"{self._name} cannot {what}: its devices are not there.",
            where=f"autopar.compile(..., devices=...) with {self._devices[0].device_kind}",
            why="they are those of a topology, for which programs can be compiled only.",
            hint="memory(), hlo() and cost() say what the compiler made of it; compile for "
            "jax.devices() to run it.",
        )

    @shortens
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Always refused.

        Raises:
          DeviceError: always.
        """
        self._refuse("run")

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool) -> Any:
        """Always refused, with a `DeviceError`."""
        self._refuse("run")

    @shortens
    def initialize(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Always refused, with a `DeviceError`."""
        self._refuse("make a state")

    @shortens
    def profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always refused, with a `DeviceError`."""
        self._refuse("be timed")

    @shortens
    def gather(self, tree: Any) -> Any:
        """Always refused, with a `DeviceError`."""
        self._refuse("gather arrays")

    @shortens
    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Always refused, with a `DeviceError`."""
        self._refuse("apply a function")


def executable_for(devices: Sequence[jax.Device] | None) -> type[Executable]:
    """The kind of executable that these devices can have."""
    return CompiledOnly if devices is not None and any(map(is_absent, devices)) else Executable
