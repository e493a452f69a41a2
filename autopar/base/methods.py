"""The values of the option `method`."""

from __future__ import annotations

import re
from typing import Any

from autopar.base.errors import OptionError, did_you_mean

BATCH_METHODS = ("data", "zero1", "zero2", "zero3", "hsdp")
"""The values of `method` that cut the batch along all axes of the mesh, and nothing else."""

WHOLE_PARAMETERS = ("data", "zero1", "zero2")
"""Those of them that store parameters whole on every device."""

GATHERED_PARAMETERS = ("zero3", "hsdp")
"""Those of them that store parameters cut, and gather them for every product."""

LOOP_METHODS = ("megatron", "megatron_sp", "expert")
"""The values of `method` that cut loops of the weights along the last axis of the mesh."""

METHODS = ("auto", *BATCH_METHODS, *LOOP_METHODS, "shard")
"""The values of `method`; each but "auto" restricts the plans that are considered."""


def check_method(method: Any) -> None:
    """Refuse what is no method.

    Raises:
      OptionError: says which there are, and the closest.
    """
    if isinstance(method, str) and method in METHODS:
        return
    if isinstance(method, str) and method.lower() in ("pipeline", "pp", "pipeline_parallel"):
        raise OptionError(
            f"There is no method {method!r}.",
            why="a method says how one mesh is used; stages say how many meshes there are.",
            hint="use stages=2 (with any method).",
        )
    raise OptionError(
        f"There is no method {method!r}.",
        why=f"the methods are {', '.join(METHODS)}.",
        hint=_of_other_names(str(method)) or did_you_mean(method, METHODS),
    )


_OTHER_NAMES = (
    ("dp ddp data_parallel dataparallel pmap replicated", "method='data'"),
    (
        "fsdp fsdp1 fsdp2 fully_shard fully_sharded fully_sharded_data_parallel",
        "method='zero3', or within nodes 'hsdp'",
    ),
    ("hybrid_shard", "method='hsdp'"),
    ("zero deepspeed sharded_optimizer", "method='zero1', 'zero2' or 'zero3'"),
    ("tp mp tensor tensor_parallel model_parallel", "method='megatron'"),
    ("sp cp sequence sequence_parallel context_parallel", "method='megatron_sp'"),
    ("ep moe expert_parallel", "method='expert'"),
    ("pp pipeline pipeline_parallel gpipe 1f1b pipedream", "stages=2, or more, with any method"),
    ("alpa gspmd spmd ilp automatic search", "method='auto', or 'shard' for all there is"),
)
"""What others call what a method does, and how to ask for it here."""


def _of_other_names(method: str) -> str | None:
    """How to ask for what other frameworks give that name, or several with a + between them."""
    found = []
    for part in re.split(r"[+,/]", method.lower()):
        name = re.sub(r"[-\s]+", "_", part.strip())
        found += [ours for names, ours in _OTHER_NAMES if name in names.split()]
    if not found:
        return None
    several = " a logical_mesh of two sizes combines them." if len(set(found)) > 1 else ""
    return f"use {'; '.join(dict.fromkeys(found))}.{several}"
