"""What all tests share: eight virtual devices and narrow exceptions to "warnings are errors"."""

import functools
import gc
import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

# Compiling is most of the suite's time. XLA:CPU's older emitters take a third of the time of the
# fusion emitters; both give the same partitioned program. JAX 0.12 no longer has the flag.
# XLA reads the variable with its first use; processes that tests start inherit it.
if metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
    )

# LLVM's expensive passes are three quarters of what is left. They change neither what XLA
# partitions nor which collectives it keeps. JAX reads it when it is imported, here and in
# processes that tests start: the last bits of a number depend on it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "True"

import jax
import pytest

# Also where a GPU is installed: the suite is about virtual CPU devices.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Tracing and planning make many objects and few cycles. At its usual pace, Python's search for
# cycles is a twelfth of the time; what a test leaves behind is found all the same, only later.
gc.set_threshold(100_000, 20, 50)


class _Contexts(threading.local):
    """MLIR's contexts of the programs that a thread lowers, a new one after some hundred of them.

    JAX makes one for every program, which takes as long as to lower a small one: it loads dialects.
    The suite lowers more than ten thousand, and none of them sees what else is in a context.
    """

    def __init__(self) -> None:
        self._left = 0

    def context(self) -> Any:
        if not self._left:
            self._context, self._left = mlir.make_ir_context(), 256
        self._left -= 1
        return self._context


class _Executables:
    """What XLA made of the last modules, taken again where the same one is compiled.

    `jax.jit` knows only its own: a step that is compiled anew has the same pieces. Modules are the
    same where their bytes are, for the same devices and options, whatever lines they come from. A
    callback's module names an object of this process, which may be another one the next time.
    """

    def __init__(self, compile_: Callable[..., Any]) -> None:
        self._compile = compile_
        self._kept: OrderedDict[bytes, Any] = OrderedDict()

    def __call__(
        self, backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        make = functools.partial(self._compile, backend, module, devices, options, host_callbacks)
        content = self._content(module)
        if host_callbacks or b"callback" in content:
            return make()
        places = repr((backend.platform, devices)).encode()
        key = hashlib.sha256(content + places + options.SerializeAsString()).digest()
        found = self._kept.pop(key, None)
        self._kept[key] = made = make() if found is None else found
        if len(self._kept) > 128:
            self._kept.popitem(last=False)
        return made

    @staticmethod
    def _content(module: Any) -> bytes:
        copy, content = module.operation.clone(), io.BytesIO()
        with module.context:
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy)
        copy.write_bytecode(file=content)
        return content.getvalue()


if metadata.version("jaxlib").startswith("0.10."):
    from jax._src import compiler as xla
    from jax._src.interpreters import mlir
    from jaxlib.mlir import passmanager

    setattr(xla, "backend_compile_and_load", _Executables(xla.backend_compile_and_load))  # noqa: B010

    contexts = _Contexts()

    class _InSharedContext(mlir.ModuleContext):
        def __init__(self, *, context: Any = None, **others: Any) -> None:
            super().__init__(context=context or contexts.context(), **others)

    setattr(mlir, "ModuleContext", _InSharedContext)  # noqa: B010 (to mypy, a class is a type)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_searched() -> None:
    """What is there before a file's tests is left out when Python searches for cycles.

    So do searches for what refers to a traced value, which every plan of a program with
    `jax.custom_jvp` makes: in a process of millions of objects they took a tenth of the time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[Any]:
    """A Ray that is started when a file asks for it, and serves all others that do."""
    from on_actors.clusters import SharedCluster

    shared = SharedCluster()
    yield shared
    shared.end()


@pytest.fixture(scope="module")
def ray_cluster(shared_ray: Any) -> None:
    """The shared Ray runs."""
    shared_ray.start()


@pytest.fixture(scope="module")
def no_ray(shared_ray: Any) -> None:
    """The shared Ray does not run."""
    shared_ray.end()


@pytest.fixture
def no_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal for memory does not look for seconds what would fit: the test is about another."""
    from autopar.passes.planner import compiler

    monkeypatch.setattr(compiler, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def solved_once() -> Iterator[None]:
    """A file's tests solve each problem once: they are about what is solved, not about how."""
    from kept_solutions import kept_solutions

    with kept_solutions():
        yield


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for grouped products are tried with a fourth of all sizes, for tiles of a fourth.

    Tiles divide them, and do not, as at full size: as programs for CPUs, kernels take a minute to
    compute hundreds of rows in tiles of 16.
    """
    from autopar.runtime import kernel_check

    monkeypatch.setattr(kernel_check, "SIZES", (75, 0, 42, 15, 25))
    monkeypatch.setattr(kernel_check, "NUM_ROWS", 160)
    monkeypatch.setattr(kernel_check, "WIDTHS", ((50, 80), (64, 128)))


LIBRARY_WARNINGS: tuple[str, ...] = ()
"""Warnings that libraries of the programs raise about themselves, each with its reason."""


def pytest_configure(config: pytest.Config) -> None:
    """Adds the exceptions to the filters of pyproject.toml."""
    for line in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts a program's tests next to each other, of all files that use its plain run."""
    ranks: dict[Any, int] = {}
    programs: dict[str, int] = {}

    def key(item: pytest.Item) -> tuple[int, int]:
        runs = getattr(getattr(item, "module", None), "plain_run", None)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        program = str(parameters.get("program", ""))
        together = runs if runs and program else item.path
        rank = ranks.setdefault(together, len(ranks))
        return rank, programs.setdefault(program, len(programs))

    items.sort(key=key)
