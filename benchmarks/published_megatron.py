"""What was measured of plans with tensor and pipeline parallelism, by Megatron-LM and OneFlow.

Four sources, each with its hardware:

- DLPerf (https://github.com/Oneflow-Inc/DLPerf, `OneFlow/LanguageModeling/GPT/README.md` and
  `Megatron-LM/README.md`, 2021): the same plans by OneFlow and by Megatron-LM on four nodes of
  eight V100s of 16 GB, joined in a node as in a DGX-1, with one EDR InfiniBand (100 Gb/s) a node.
- BigScience (https://github.com/bigscience-workshop/bigscience,
  `train/tr11-176B-ml/chronicles-prequel.md`, tables of 2022-02-25, rows of 2,048 sequences): one
  GPT of 181B by Megatron-DeepSpeed on 48 nodes of eight A100s of 80 GB, with four Omni-Path links
  (100 Gb/s) a node, and a vocabulary of 250k; ZeRO-1 over the replicas.
- Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM" (SC 2021), table 1, with microbatches and chunks from `examples/sc21/run_table_1.sh`
  of https://github.com/NVIDIA/Megatron-LM: DGX A100s.
- Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
  tables 3 and 5: the same, with everything recomputed, and with sequence parallelism and the
  attention alone recomputed.

Not copied from a text but written from memory, to be checked against the papers: Korthikanti's
tables, the TFLOP/s of Narayanan's table 1, and the number of BigScience's links.
"""

from __future__ import annotations

import dataclasses
import math

from published_alpa import megatron_seconds
from published_models import Decoder, Row


def dlperf() -> list[Row]:
    """Sixteen plans, each measured with both frameworks."""
    small, large = (1536, 16, 16), (2304, 24, 24)
    measured = [
        # hidden, layers, heads; data, tensor, stages; batch, microbatches; both frameworks' ms
        (small, (1, 1, 1), 2, 1, 406.16, 464.12),
        (small, (8, 1, 1), 16, 1, 417.95, 480.96),
        (small, (16, 1, 1), 32, 1, 489.67, 664.46),
        (small, (32, 1, 1), 64, 1, 518.64, 683.51),
        ((768, 12, 12), (1, 1, 1), 8, 1, 525.21, 611.2),
        (small, (1, 8, 1), 16, 1, 644.4, 664.64),
        (small, (2, 4, 1), 16, 1, 539.69, 576.48),
        (small, (4, 2, 1), 16, 1, 543.88, 593.68),
        ((3072, 16, 32), (1, 16, 1), 16, 1, 4819.29, 5610.23),
        ((3072, 32, 32), (1, 32, 1), 16, 1, 9505.83, 13037.85),
        (large, (2, 8, 1), 16, 1, 1268.53, 1313.52),
        (large, (4, 8, 1), 32, 1, 1480.34, 1508.48),
        (small, (8, 1, 4), 512, 32, 4006.31, 4893.55),
        (large, (1, 8, 4), 512, 32, 19196.65, 22166.85),
        (large, (2, 4, 4), 512, 32, 13117.18, 15331.23),
        (large, (2, 8, 2), 512, 32, 14375.35, 16281.51),
    ]
    rows = []
    for framework, place in (("OneFlow", 0), ("Megatron-LM", 1)):
        for (hidden, layers, heads), (data, tensor, stages), batch, microbatches, *ms in measured:
            gpus = data * tensor * stages
            row = Row(
                f"GPT h{hidden} L{layers} B{batch}",
                f"DLPerf, {framework}",
                f"{math.ceil(gpus / 8)}x{min(gpus, 8)} v100-edr",
                Decoder(hidden, layers, heads, 51200, sequence=2048),
                batch,
                microbatches,
                "megatron" if tensor > 1 else "data",
                (data, tensor) if tensor > 1 else (data,),
                stages,
                ms[place] / 1000,
            )
            rows.append(row)
    return rows


def bigscience() -> list[Row]:
    """One model on the same 384 GPUs, by eleven plans."""
    measured = [
        # data, tensor, stages, sequences in a microbatch, batch, seconds
        (8, 8, 6, 4, 2048, 114.11),
        (4, 8, 12, 4, 2048, 117.07),
        (4, 8, 12, 2, 2048, 128.82),
        (8, 4, 12, 4, 2048, 111.89),
        (8, 4, 12, 2, 2048, 110.48),
        (16, 4, 6, 4, 2048, 117.11),
        (16, 4, 6, 2, 2048, 111.71),
        (16, 2, 12, 2, 2048, 112.50),
        (8, 2, 24, 1, 2048, 119.53),
        (8, 2, 24, 2, 2048, 122.75),
        (4, 4, 24, 1, 2048, 130.60),
    ]
    return [
        Row(
            f"GPT-181B, {size} a microbatch",
            "BigScience, 384 A100",
            "48x8 jean-zay-a100",
            Decoder(14336, 72, 64, 250880, sequence=2048),
            batch,
            batch // (data * size),
            "megatron",
            (data, tensor),
            stages,
            seconds,
        )
        for data, tensor, stages, size, batch, seconds in measured
    ]


def narayanan() -> list[Row]:
    """Models from 1.7B to a trillion."""
    measured = [
        # hidden, layers, heads; GPUs, tensor, stages, chunks, in a microbatch, batch, TFLOP/s
        ("1.7B", (2304, 24, 24), 32, 1, 1, 1, 16, 512, 137),
        ("3.6B", (3072, 30, 32), 64, 2, 1, 1, 16, 512, 138),
        ("7.5B", (4096, 36, 32), 128, 4, 1, 1, 16, 512, 142),
        ("18B", (6144, 40, 48), 256, 8, 1, 1, 8, 1024, 135),
        ("39B", (8192, 48, 64), 512, 8, 2, 1, 4, 1536, 138),
        ("76B", (10240, 60, 80), 1024, 8, 4, 3, 2, 1792, 140),
        ("145B", (12288, 80, 96), 1536, 8, 8, 2, 2, 2304, 148),
        ("310B", (16384, 96, 128), 1920, 8, 16, 2, 1, 2160, 155),
        ("530B", (20480, 105, 128), 2520, 8, 35, 3, 1, 2520, 163),
        ("1T", (25600, 128, 160), 3072, 8, 64, 1, 1, 3072, 163),
    ]
    rows = []
    for name, shape, gpus, tensor, stages, chunks, size, batch, tflops in measured:
        hidden, layers, heads = shape
        model = Decoder(hidden, layers, heads, 51200, sequence=2048)
        data = gpus // tensor // stages
        row = Row(
            f"GPT-{name}",
            "Megatron-LM, table 1",
            f"{gpus // 8}x8 dgx-a100",
            model,
            batch,
            batch // (data * size),
            "megatron" if tensor > 1 else "data",
            (data, tensor) if tensor > 1 else (data,),
            stages,
            megatron_seconds(model, batch, gpus, tflops),
            chunks,
        )
        rows.append(row)
    return rows


def korthikanti() -> list[Row]:
    """Four models, each with everything recomputed and with little."""
    measured = [
        # hidden, layers, heads; stages, chunks, in a microbatch, batch; seconds: all, and attention
        ("22B", (6144, 48, 64), 1, 1, 4, 4, 1.42, 1.10),
        ("175B", (12288, 96, 96), 8, 3, 1, 64, 18.13, 13.75),
        ("530B", (20480, 105, 128), 35, 3, 1, 280, 49.05, 37.83),
        ("1T", (25600, 128, 160), 64, 1, 1, 512, 94.42, 71.49),
    ]
    rows = []
    for name, (hidden, layers, heads), stages, chunks, size, batch, *seconds in measured:
        model = Decoder(hidden, layers, heads, 51200, sequence=2048)
        all_again = Row(
            f"GPT-{name}, all recomputed",
            "Korthikanti et al., table 5",
            f"{stages}x8 dgx-a100",
            model,
            batch,
            batch // size,
            "megatron",
            (1, 8),
            stages,
            seconds[0],
            chunks,
        )
        few = dataclasses.replace(model, attention="recomputed", recomputed=False)
        little = dataclasses.replace(
            all_again,
            name=f"GPT-{name}, attention recomputed",
            model=few,
            method="megatron_sp",
            seconds=seconds[1],
        )
        rows += [all_again, little]
    return rows
