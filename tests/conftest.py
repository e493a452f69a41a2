"""What all tests share: eight virtual devices and narrow exceptions to "warnings are errors"."""

import gc
import os
from importlib import metadata

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

import jax
import pytest

# Also where a GPU is installed: the suite is about virtual CPU devices.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# LLVM's expensive passes are three quarters of what is left. They change neither what XLA
# partitions nor which collectives it keeps.
jax.config.update("jax_disable_most_optimizations", True)

# Tracing and planning make many objects and few cycles. At its usual pace, Python's search for
# cycles is a twelfth of the time; what a test leaves behind is found all the same, only later.
gc.set_threshold(100_000, 20, 50)

LIBRARY_WARNINGS: tuple[str, ...] = ()
"""Warnings that libraries of the programs raise about themselves, each with its reason."""


def pytest_configure(config: pytest.Config) -> None:
    """Adds the exceptions to the filters of pyproject.toml."""
    for line in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts a file's tests of one program next to each other, so that they share its plain run."""
    files = {item.path: None for item in items}
    rank = {path: index for index, path in enumerate(files)}
    programs: dict[str, int] = {}

    def key(item: pytest.Item) -> tuple[int, int]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        program = str(parameters.get("program", ""))
        return rank[item.path], programs.setdefault(program, len(programs))

    items.sort(key=key)
