"""What `compilers.py` compiles: programs, the size of their batches, and options of plans."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A program, how many sequences (or images) a step has, and the options of its plan.

    Remat "dots": all is computed again but products. `fields` are those of the model's module.

    From those `held_out`, no rule of memory was read (`passes/sharding/compiler_rules.py`).
    """

    program: str
    batch: int
    remat: bool | str
    options: dict[str, Any]
    held_out: bool = False
    fields: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        named = {**self.fields, **self.options}
        more = " ".join(f"{key}={value}" for key, value in named.items())
        again = " remat" if self.remat is True else f" {self.remat}" if self.remat else ""
        return f"{self.program}{again} {more}"


def case(program: str, batch: int, remat: bool | str = False, **options: Any) -> Case:
    return Case(program, batch, remat, {"microbatches": 1, **options})


WRITTEN_OUT = {"attention": "xla"}
"""Attention with several query heads for a key head, as products and a softmax."""

CASES = (
    case("gpt-125M", 64, method="data"),
    case("gpt-125M", 64, method="zero3"),
    case("gpt-125M", 64, method="zero1"),
    case("gpt-125M", 128, method="zero2", microbatches=4),
    case("gpt-125M", 64, remat=True, method="zero3"),
    case("gpt-125M", 64, remat="dots", method="zero3"),
    case("gpt-350M", 64, method="zero3"),
    case("gpt-350M", 128, remat=True, method="zero3", microbatches=4),
    case("gpt-350M", 32, method="megatron"),
    case("gpt-1.3B", 32, remat=True, method="zero3"),
    case("gpt-1.3B", 16, method="shard"),
    case("gpt-350M", 64, method="data", stages=2, microbatches=4),
    case("bert-base", 256, method="data", stages=2, microbatches=4),
    case("vit-base", 1024, method="zero2", stages=2, microbatches=4),
    case("unet-60M", 512, method="data", stages=2, microbatches=4),
    case("llama-7B", 16, method="zero3"),
    case("llama-scanned-7B", 16, remat=True, method="zero3"),
    case("gpt-350M", 64, remat=True, method="zero2"),
    case("llama-scanned-7B", 16, remat="dots", method="zero3"),
    case("moe-380M", 64, method="zero3"),
    case("moe-380M", 64, method="expert"),
    case("wide-resnet-250M", 64, method="data"),
    case("wide-resnet-250M", 128, method="zero2", microbatches=4),
    case("bert-large", 64, method="zero3"),
    case("vit-base", 512, method="data"),
    case("unet-60M", 256, method="data"),
    case("lstm-66M", 512, method="data"),
    case("graph-small", 256, method="data"),
    case("deepseek-16B", 32, remat=True, method="zero3"),
    case("unet-130M", 256, remat=True, method="zero3"),
    case("lstm-180M", 256, method="zero3"),
    case("graph-small", 512, method="zero2", microbatches=2),
    case("llama3-8B", 8, remat=True, method="zero3")._replace(fields=WRITTEN_OUT),
    case("delta-1.6B", 32, remat=True, method="zero3"),
    case("lstm-180M", 256, remat=True, method="zero3"),
)
HELD_OUT = (
    case("gpt-760M", 32, remat=True, method="zero3"),
    case("gpt-760M", 32, method="data"),
    case("gpt-350M", 128, method="zero2", microbatches=8),
    case("gpt-2.6B", 16, method="megatron"),
    case("gpt-125M", 128),
    case("gpt-760M", 32, remat="dots", method="data"),
    case("bert-large", 64, remat="dots", method="zero3"),
    case("gpt-760M", 32, method="zero2", stages=2, microbatches=4),
    case("bert-large", 128, method="zero2", stages=2, microbatches=8),
    case("vit-large", 512, method="data", stages=2, microbatches=4),
    case("unet-130M", 512, method="zero2", stages=2, microbatches=4),
    case("llama-7B", 16, method="zero2", microbatches=2),
    case("llama-scanned-7B", 8, method="data"),
    case("llama-scanned-7B", 8, remat=True, method="megatron"),
    case("moe-690M", 64, method="zero3"),
    case("moe-690M", 64, remat=True, method="expert"),
    case("wide-resnet-500M", 64, method="zero3"),
    case("wide-resnet-500M", 64, remat=True, method="data"),
    case("bert-base", 256, remat=True, method="zero2", microbatches=2),
    case("bert-large", 64, method="data"),
    case("vit-large", 512, remat=True, method="zero3"),
    case("vit-large", 512, method="zero2", microbatches=4),
    case("unet-130M", 512, method="zero2", microbatches=4),
    case("lstm-66M", 1024, method="zero2", microbatches=4),
    case("graph-large", 64, remat=True, method="zero3"),
    case("gpt-760M", 32, method="zero3"),
    case("gpt-760M", 64, remat=True, method="zero2", microbatches=2),
    case("bert-large", 128, remat=True, method="zero3", microbatches=2),
    case("vit-large", 512, remat="dots", method="data"),
    case("moe-690M", 64, method="zero2", microbatches=2),
    case("gpt-2.6B", 16, remat=True, method="shard"),
    case("llama-scanned-7B", 8, remat="dots", method="megatron"),
    case("graph-large", 64, method="data"),
    case("gpt-350M", 64, remat=True, method="data", stages=2, microbatches=4),
    case("llama3-8B", 16, remat=True, method="zero2", microbatches=2)._replace(fields=WRITTEN_OUT),
    case("llama3-8B", 8, method="zero3")._replace(fields=WRITTEN_OUT),
    case("delta-1.6B", 64, remat=True, method="zero2", microbatches=2),
)
ALL = (*CASES, *(item._replace(held_out=True) for item in HELD_OUT))
