"""What a test program is: a train step, its state, three batches, and how to compare its runs."""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Tolerance:
    """How far a parallel run may be from the plain one; see `programs.compare` for the reasons.

    Args:
        relative: the largest accepted difference inside a leaf, in units of the largest magnitude
            that the leaf holds; `None` takes the figure of the leaf's dtype.
        zero_gradients: fragments of the paths of parameters whose gradient is zero in exact
            arithmetic (the bias of attention keys), so that what they hold is rounding noise.
        zero_scale: the magnitude that such leaves are compared in units of.
    """

    relative: float | None = None
    zero_gradients: tuple[str, ...] = ()
    zero_scale: float = 1e-2


def first_output(state: Any, outputs: Any) -> Any:
    """The next state of a step that returns `(state, ...)`."""
    del state
    return outputs[0]


def same_state(state: Any, outputs: Any) -> Any:
    """The next state of a step that only reads it."""
    del outputs
    return state


def state_then_batch(state: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments of a step that takes its whole state first."""
    return (state, *batch)


@dataclass
class Case:
    """One built program.

    Args:
        step: the train step, a plain function of one device.
        state: its first argument, never donated by whoever holds the case: runs get copies.
        batches: three tuples, the positional arguments that follow the state.
        keywords: three dictionaries of keyword arguments, or empty.
        options: what autopar must be told where its automatic choice would be ambiguous.
        plain: the jitted plain function where `jax.jit(step)` is not how the library's users
            write it.
        arguments: puts a state and a batch into the order of the step's parameters.
        next_state: takes a state and the outputs that it led to, returns what the next step gets.
    """

    step: Callable[..., Any]
    state: Any
    batches: list[tuple[Any, ...]]
    keywords: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    plain: Any = None
    arguments: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] = state_then_batch
    next_state: Callable[[Any, Any], Any] = first_output

    def __post_init__(self) -> None:
        if self.plain is None:
            static = self.options.get("static_argnums", ())
            self.plain = jax.jit(self.step, static_argnums=static)
        if not self.keywords:
            self.keywords = [{} for _ in self.batches]

    @property
    def batch(self) -> tuple[Any, ...]:
        """The first batch."""
        return self.batches[0]

    def call(self, function: Callable[..., Any], state: Any, index: int) -> Any:
        """Calls `function`, a form of `step`, on a state and the batch of that index."""
        arguments = self.arguments(state, self.batches[index])
        return function(*arguments, **self.keywords[index])


@dataclass(frozen=True)
class Program:
    """An entry of the registry.

    Args:
        name: what tests and reports call it.
        module: the file below `tests/programs` that defines it.
        function: the function of that file that builds its `Case`.
        settings: keyword arguments of that function.
        loops: how many loops over four microbatches an exact split takes; 0 if there is none.
        tolerance: how its runs are compared.
        requires: packages besides JAX, NumPy and Optax that it imports.
        x64: whether it is built and run with 64-bit types enabled (see `context`).
        prints: whether it prints from inside the step.
    """

    name: str
    module: str
    function: str = "build"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    loops: int = 1
    tolerance: Tolerance = Tolerance()
    requires: tuple[str, ...] = ()
    x64: bool = False
    prints: bool = False

    @property
    def splits(self) -> bool:
        """Whether one loop does, from which stages can be cut."""
        return self.loops == 1

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> Path:
        """The file that the program's source lines are in."""
        return Path(__file__).with_name(f"{self.module}.py")

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What must be entered around building, compiling and running the program."""
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()

    def missing(self) -> str | None:
        """Why the program cannot run here, or None if it can."""
        for name in self.requires:
            try:
                importlib.import_module(name)
            except Exception as error:  # a library may fail in any way beside a newer JAX
                return f"{name} cannot be imported: {type(error).__name__}: {error}"
        return None

    def build(self) -> Case:
        """Imports the program's file and builds it, inside `context`."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        with self.context():
            case: Case = getattr(module, self.function)(**self.settings)
        return case
