"""What all tests share: eight virtual devices and narrow exceptions to "warnings are errors"."""

import sys
from pathlib import Path

import jax
import pytest

# The programs are a package of their own, which benchmarks import in the same way.
sys.path.insert(0, str(Path(__file__).parent))

jax.config.update("jax_num_cpu_devices", 8)

LIBRARY_WARNINGS: tuple[str, ...] = ()
"""Warnings that libraries of the programs raise about themselves, each with its reason."""


def pytest_configure(config: pytest.Config) -> None:
    """Adds the exceptions to the filters of pyproject.toml."""
    for line in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
