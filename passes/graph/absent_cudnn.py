"""Attention by cuDNN, traced where there is no GPU.

`jax.nn.dot_product_attention(..., implementation="cudnn")` asks which release of cuDNN is loaded
and what the first GPU can do, and refuses where there is none, though the equation that it makes
holds neither. Where a step is planned for GPUs that are elsewhere, these questions are answered for
them. No public name does that (`jax_compat.py` has what else has none).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from jax.extend import backend

try:
    from jax._src.cudnn import fused_attention_stablehlo

    ATTENTION: ModuleType | None = fused_attention_stablehlo
except ImportError:  # another release
    ATTENTION = None

ASSUMED_CUDNN = 91000
"""The release 9.10, the first that has all that JAX's attention can ask for."""

_QUESTIONS = ("check_cudnn_version", "check_compute_capability")
_capability: ContextVar[int] = ContextVar("capability", default=0)
_lock = threading.Lock()


@contextmanager
def answering_for(capability: int) -> Iterator[None]:
    """Within it, JAX traces attention by cuDNN as where GPUs have this major compute capability.

    Where this process has a GPU, that answers. Other threads are not concerned.
    """
    _ask_here_first()
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def has_gpu() -> bool:
    """Whether JAX has an NVIDIA GPU in this process, as its attention asks."""
    return "cuda" in backend.get_backend().platform_version


def _ask_here_first() -> None:
    """JAX's two questions are asked here from now on: outside of `answering_for`, it answers."""
    with _lock:
        if ATTENTION is None or not all(hasattr(ATTENTION, name) for name in _QUESTIONS):
            return
        asked_version, asked_capability = (getattr(ATTENTION, name) for name in _QUESTIONS)
        if hasattr(asked_version, "__wrapped__"):
            return

        @functools.wraps(asked_version)
        def version() -> Any:
            return ASSUMED_CUDNN if _capability.get() and not has_gpu() else asked_version()

        @functools.wraps(asked_capability)
        def is_capable(least: str) -> bool:
            if _capability.get() and not has_gpu():
                return tuple(map(int, least.split("."))) <= (_capability.get(), 0)
            return bool(asked_capability(least))

        for name, answer in zip(_QUESTIONS, (version, is_capable), strict=True):
            setattr(ATTENTION, name, answer)
