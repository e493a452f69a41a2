"""What was measured of PyTorch's fully sharded data parallelism, with flash attention, in bfloat16.

- MosaicML, LLM Foundry, `scripts/train/benchmarking/README.md` of
  https://github.com/mosaicml/llm-foundry, tables "H100 80GB BF16" and "A100 40GB with 1600 Gbps
  node-node interconnect", rows of 2,048 tokens a sequence: MPT models (`scripts/train/yamls`). The
  network of the H100s is not said, and taken for a DGX H100's.
- IBM, https://github.com/foundation-model-stack/fms-fsdp, `README.md` (the first published table):
  Llama 2 on 128 A100s, 400 Gb/s a node; "HSDP" has parameters sharded in a node and whole over
  nodes.
- PyTorch, https://github.com/pytorch/torchtitan, `docs/performance.md` (of June 2024: Llamas on 64
  A100s) and `benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md` (256 H100s, tensor parallelism
  without overlap). Rows with selective recomputation are left out: what it keeps is PyTorch's.
  Their H100s have memory of 2.4 TB/s and 500 W.

FSDP gathers parameters ahead and adds gradients beside the backward pass, so clusters here overlap
(`overlap=1`). The measured figure is tokens per second and GPU.
"""

from __future__ import annotations

from published_models import Decoder, Row

MPT = {
    # hidden, layers, heads
    "70b": (8192, 80, 64),
    "30b": (7168, 48, 56),
    "13b": (5120, 40, 40),
    "7b": (4096, 32, 32),
    "3b": (2560, 32, 20),
    "1b": (2048, 24, 16),
}

LLAMAS = {
    # hidden, layers, heads, vocabulary, sequence; inner features, heads of keys
    "Llama 2 7B": ((4096, 32, 32, 32000, 4096), (11008, 32)),
    "Llama 2 13B": ((5120, 40, 40, 32000, 4096), (13824, 40)),
    "Llama 34B": ((8192, 48, 64, 32000, 4096), (22016, 8)),
    "Llama 2 70B": ((8192, 80, 64, 32000, 4096), (28672, 8)),
    "Llama 3 70B": ((8192, 80, 64, 128256, 8192), (28672, 8)),
}


def mosaic() -> list[Row]:
    """MPT models of 1 to 70 billion parameters on 8 to 128 GPUs."""
    h100 = [
        # model, GPUs, sequences in a microbatch of a GPU, microbatches, recomputed, tokens/s/GPU
        ("70b", 64, 8, 4, True, 1039),
        ("70b", 32, 2, 16, True, 882),
        ("30b", 32, 14, 3, True, 2308),
        ("30b", 16, 10, 3, True, 2263),
        ("30b", 8, 3, 21, True, 2002),
        ("13b", 64, 2, 1, False, 4800),
        ("13b", 32, 2, 1, False, 4811),
        ("13b", 16, 2, 1, False, 4767),
        ("13b", 8, 2, 1, False, 4792),
        ("7b", 8, 6, 1, False, 10643),
        ("3b", 64, 6, 3, False, 22525),
        ("3b", 16, 10, 3, False, 24142),
        ("1b", 64, 20, 1, False, 44402),
        ("1b", 8, 14, 1, False, 45455),
    ]
    a100 = [
        ("70b", 128, 4, 1, True, 376),
        ("70b", 64, 2, 1, True, 276),
        ("30b", 128, 6, 1, True, 865),
        ("30b", 32, 4, 1, True, 857),
        ("13b", 128, 16, 1, True, 1972),
        ("13b", 16, 10, 1, True, 1993),
        ("13b", 8, 4, 16, True, 1668),
        ("7b", 128, 18, 1, True, 3623),
        ("7b", 16, 16, 1, True, 3645),
        ("7b", 8, 12, 4, True, 3679),
        ("3b", 128, 6, 1, False, 9538),
        ("3b", 16, 5, 1, False, 9750),
        ("3b", 8, 5, 8, False, 10065),
    ]
    rows = []
    for kind, source, measured in (
        ("dgx-h100", "LLM Foundry, H100", h100),
        ("dgx-a100-40gb", "LLM Foundry, A100 40GB", a100),
    ):
        for name, gpus, size, microbatches, recomputed, rate in measured:
            hidden, layers, heads = MPT[name]
            batch = gpus * size * microbatches
            model = Decoder(
                hidden, layers, heads, 50368, 2048, "bfloat16", "cudnn", recomputed, copied=False
            )
            row = Row(
                f"MPT-{name}, {size} a microbatch",
                source,
                f"{gpus // 8}x8 {kind}",
                model,
                batch,
                microbatches,
                "zero3",
                (gpus,),
                1,
                batch * 2048 / (rate * gpus),
                overlap=1.0,
            )
            rows.append(row)
    return rows


def llamas() -> list[Row]:
    """Llamas on A100s and H100s."""
    measured = [
        # GPUs, cluster, method, mesh, sequences of a data-parallel rank, recomputed, tokens/s/GPU
        ("Llama 2 7B", 128, "a100-400g", "hsdp", (16, 8), 2, False, 3760),
        ("Llama 2 13B", 128, "a100-400g", "hsdp", (16, 8), 1, False, 1700),
        ("Llama 34B", 128, "a100-400g", "zero3", (128,), 8, True, 772),
        ("Llama 2 70B", 128, "a100-400g", "zero3", (128,), 6, True, 380),
        ("Llama 2 13B", 64, "dgx-a100", "zero3", (64,), 2, False, 2162),
        ("Llama 2 70B", 64, "dgx-a100", "zero3", (64,), 2, True, 353),
        ("Llama 3 70B", 64, "dgx-a100", "zero3", (64,), 1, True, 331),
        ("Llama 3 70B", 256, "dgx-h100", "megatron_sp", (32, 8), 16, True, 597.3),
    ]
    rows = []
    for name, gpus, kind, method, mesh, size, recomputed, rate in measured:
        shape, (inner, key_heads) = LLAMAS[name]
        model = Decoder(
            *shape, "bfloat16", "cudnn", recomputed, copied=False, inner=inner, key_heads=key_heads
        )
        ranks = mesh[0] if method == "megatron_sp" else gpus
        row = Row(
            name,
            "FSDP, Llamas",
            f"{gpus // 8}x8 {kind}",
            model,
            size * ranks,
            1,
            method,
            mesh,
            1,
            size * ranks * model.sequence / (rate * gpus),
            overlap=1.0,
        )
        rows.append(row)
    return rows
