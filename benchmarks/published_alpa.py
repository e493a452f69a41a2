"""What Alpa's authors measured of their own plans on AWS p3.16xlarge.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning"
(OSDI 2022), as the numbers stand in the authors' repository
(https://github.com/alpa-projects/alpa): `osdi22_artifact/results_intra_ablation.tsv` and
`results_e2e.tsv`, with the plans in `benchmark/alpa/exp_intra_ablation.py`, `exp_intra_only.py` and
`README.md`. The 39B row is theirs as TFLOP/s per GPU, by their count of operations. XLA overlaps
nothing there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from published_models import Decoder, Row


def megatron_seconds(model: Decoder, batch: int, gpus: int, tflops: float) -> float:
    """Seconds of a step from TFLOP/s per GPU, as the authors of Alpa and Megatron-LM count them.

    96 B S L H^2 (1 + S / 6H + V / 16LH), with the forward pass computed twice (Narayanan et al.,
    2021, equation 3).
    """
    hidden, layers, sequence = model.hidden, model.layers, model.sequence
    operations: float = 96 * batch * sequence * layers * hidden**2
    operations *= 1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return operations / (gpus * tflops * 1e12)


def ablation() -> list[Row]:
    """One node or a part of it, one mesh, eight layers."""
    measured = [
        # hidden, heads, method, mesh, seconds
        (2048, 16, "shard", (1,), 0.4538),
        (3072, 24, "zero2", (2,), 0.5370),
        (3072, 24, "megatron", (1, 2), 0.5753),
        (3072, 24, "zero3", (2,), 0.6356),
        (4096, 32, "zero2", (4,), 0.4333),
        (4096, 32, "megatron", (2, 2), 0.5815),
        (4096, 32, "megatron", (1, 4), 0.4457),
        (4096, 32, "zero3", (4,), 0.4976),
        (5760, 40, "megatron", (4, 2), 0.5803),
        (5760, 40, "megatron", (2, 4), 0.5028),
        (5760, 40, "megatron", (1, 8), 0.4539),
        (5760, 40, "zero3", (8,), 0.5219),
    ]
    return [
        Row(
            f"GPT h{hidden} L8, {method}",
            "Alpa, intra-operator ablation",
            f"1x{np.prod(mesh)} p3.16xlarge",
            Decoder(hidden, 8, heads, 25600),
            8,
            1,
            method,
            mesh,
            1,
            seconds,
        )
        for hidden, heads, method, mesh, seconds in measured
    ]


def end_to_end() -> list[Row]:
    """Models of the paper's size on one to eight nodes."""

    def row(
        name: str, model: tuple[int, int, int], nodes: int, *plan: Any, batch: int = 1024
    ) -> Row:
        hidden, layers, heads = model
        microbatches, method, mesh, stages, seconds = plan
        per_node = int(np.prod(mesh)) * stages // nodes
        cluster = f"{nodes}x{per_node} p3.16xlarge"
        decoder = Decoder(hidden, layers, heads, 51200)
        source = "Alpa, end to end"
        return Row(
            name, source, cluster, decoder, batch, microbatches, method, mesh, stages, seconds
        )

    largest = Decoder(8192, 48, 64, 51200)
    return [
        row("GPT-350M", (1024, 24, 16), 1, 64, "shard", (1,), 1, 71.13),
        row("GPT-760M", (1536, 24, 16), 1, 64, "zero2", (2,), 1, 57.38),
        row("GPT-1.3B", (2048, 24, 32), 1, 64, "zero2", (4,), 1, 49.94),
        row("GPT-2.6B", (2560, 32, 32), 1, 32, "megatron", (4, 2), 1, 57.42),
        row("GPT-6.7B", (4096, 32, 32), 2, 64, "megatron", (2, 8), 1, 74.29),
        row("GPT-2.6B", (2560, 32, 32), 1, 4, "megatron", (2, 2), 2, 2.425, batch=32),
        row("GPT-39B", (8192, 48, 64), 8, 1024, "megatron", (1, 4), 16,
            megatron_seconds(largest, 1024, 64, 57.0)),
    ]  # fmt: skip
