"""Attention by cuDNN, traced where there is no GPU.

`jax.nn.dot_product_attention(..., implementation="cudnn")` asks which release of cuDNN is loaded
and what the first GPU can do, and refuses where there is none, though the equation that it makes
holds neither. Where a step is planned for GPUs that are elsewhere, these questions are answered for
them. No public name does that (`jax_compat.py` has what else has none).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

try:
    from jax._src.cudnn import fused_attention_stablehlo

    ATTENTION: ModuleType | None = fused_attention_stablehlo
except ImportError:  # another release
    ATTENTION = None

ASSUMED_CUDNN = 91000
"""The release 9.10, the first that has all that JAX's attention can ask for."""

_QUESTIONS = ("check_cudnn_version", "check_compute_capability")
_lock = threading.RLock()


@contextmanager
def answering_for(capability: int) -> Iterator[None]:
    """Within it, JAX traces attention by cuDNN as where GPUs have this major compute capability.

    Where there is a GPU, it answers. One thread at a time.
    """
    if ATTENTION is None or not all(hasattr(ATTENTION, name) for name in _QUESTIONS):
        yield
        return
    with _lock:
        asked: list[Any] = [getattr(ATTENTION, name) for name in _QUESTIONS]

        def version() -> Any:
            try:
                return asked[0]()
            except RuntimeError:  # cuDNN is not there
                return ASSUMED_CUDNN

        def is_capable(least: str) -> bool:
            try:
                asked[0]()
            except RuntimeError:
                return tuple(map(int, least.split("."))) <= (capability, 0)
            return bool(asked[1](least))

        for name, answer in zip(_QUESTIONS, (version, is_capable), strict=True):
            setattr(ATTENTION, name, answer)
        try:
            yield
        finally:
            for name, answer in zip(_QUESTIONS, asked, strict=True):
                setattr(ATTENTION, name, answer)
