"""The real programs that autopar must run: ordinary train steps, each tiny, in a registry.

Every entry of `PROGRAMS` builds a `Case` (a step, a state, three batches). The files are written
as the libraries' own documentation writes train steps; nothing in them knows of autopar, but for
the `options` of a case where an automatic choice would be ambiguous. Their libraries are imported
when a program is built.
"""

from typing import Any

from .case import Case, Program, Tolerance

__all__ = ["PROGRAMS", "Case", "Program", "Tolerance"]

_FLAX = ("flax",)
_HUGGING_FACE = ("flax", "transformers")
_BFLOAT16 = Tolerance(relative=5e-2)
_KEY_BIASES = Tolerance(zero_gradients=("['key']['bias']",))


def _all() -> list[Program]:
    sgd = {"optimizer": "sgd"}
    double: dict[str, Any] = {"optimizer": "sgd", "dtype": "float64"}
    double_adam: dict[str, Any] = {"optimizer": "adam", "dtype": "float64"}
    return [
        Program("mlp", "mlp"),
        Program("mlp_sgd", "mlp", settings=sgd),
        Program("mlp_float64", "mlp", settings=double_adam, x64=True),
        Program("mlp_documented", "mlp", "build_documented"),
        Program("mlp_keywords", "mlp", "build_keywords"),
        Program("mlp_static", "mlp", "build_static"),
        Program("mlp_multi_steps", "mlp", "build_multi_steps"),
        Program("cnn", "cnn", requires=_FLAX),
        Program("cnn_sgd", "cnn", settings=sgd, requires=_FLAX),
        Program("cnn_batch_norm", "cnn", "build_batch_norm", loops=2, requires=_FLAX),
        Program("linen_gpt", "linen_gpt", requires=_FLAX),
        Program("linen_gpt_sgd", "linen_gpt", settings=sgd, requires=_FLAX),
        Program("linen_gpt_float64", "linen_gpt", settings=double, x64=True, requires=_FLAX),
        Program("nnx_transformer", "nnx_transformer", requires=_FLAX),
        Program("nnx_graphdef", "nnx_transformer", "build_with_graphdef", requires=_FLAX),
        Program("equinox_transformer", "equinox_transformer", requires=("equinox",)),
        Program(
            "equinox_documented", "equinox_transformer", "build_documented", requires=("equinox",)
        ),
        Program("haiku_resnet", "haiku_resnet", loops=0, requires=("haiku",)),
        Program(
            "haiku_resnet_eval",
            "haiku_resnet",
            settings={"train": False},
            requires=("haiku",),
        ),
        Program("hf_gpt2", "hf_models", "build_gpt2", requires=_HUGGING_FACE),
        Program(
            "hf_bert", "hf_models", "build_bert", requires=_HUGGING_FACE, tolerance=_KEY_BIASES
        ),
        Program("hf_vit", "hf_models", "build_vit", requires=_HUGGING_FACE, tolerance=_KEY_BIASES),
        Program("scan_layers", "scan_layers", requires=_FLAX),
        Program("scan_layers_float64", "scan_layers", settings=double, x64=True, requires=_FLAX),
        Program("scan_layers_linen", "scan_layers", "build_linen", requires=_FLAX),
        Program("lstm", "lstm", requires=_FLAX),
        Program("lstm_time_first", "lstm", settings={"time_first": True}, requires=_FLAX),
        Program("lstm_float64", "lstm", settings=double, x64=True, requires=_FLAX),
        Program("lstm_linen", "lstm", "build_linen", requires=_FLAX),
        Program("moe_one_hot", "moe"),
        Program("moe_sort", "moe", settings={"dispatch": "sort"}),
        Program("moe_one_hot_batch", "moe", settings={"whole_batch": True}, loops=3),
        Program(
            "moe_sort_batch",
            "moe",
            settings={"dispatch": "sort", "whole_batch": True},
            loops=0,
        ),
        Program("unet", "unet", requires=_FLAX),
        Program("graph_network", "graph_network"),
        Program("token_weighted", "token_weighted"),
        Program("token_weighted_float64", "token_weighted", settings=double, x64=True),
        Program("two_views", "two_views"),
        Program("loss_scale_where", "loss_scaling", "build_where", requires=_FLAX),
        Program("loss_scale_cond", "loss_scaling", "build_cond", requires=_FLAX),
        Program("bfloat16", "mixed_precision", requires=_FLAX, tolerance=_BFLOAT16),
        Program(
            "bfloat16_sgd", "mixed_precision", settings=sgd, requires=_FLAX, tolerance=_BFLOAT16
        ),
        Program(
            "bfloat16_scan",
            "mixed_precision",
            "build_scanned",
            requires=_FLAX,
            tolerance=_BFLOAT16,
        ),
        Program("ema", "ema"),
        Program("contrastive", "contrastive", loops=2),
        Program("custom_vjp", "custom_vjp"),
        Program("per_example_metrics", "per_example", "build_metrics"),
        Program("per_example_gradients", "per_example", "build_private"),
        Program("key_typed", "keys", settings={"kind": "typed"}),
        Program("key_raw", "keys", settings={"kind": "raw"}),
        Program("key_rbg", "keys", settings={"kind": "rbg"}),
        Program("key_per_example", "keys", "build_augmentation"),
        Program("leaf_kinds", "leaf_kinds", requires=_FLAX),
        Program("debug_print", "debug_print", prints=True),
        Program("batch_shapes", "batch_shapes", requires=_FLAX),
        Program("evaluation", "evaluation", requires=_FLAX),
        Program("generation", "evaluation", "build_generation", requires=_FLAX),
        Program("autoencoder", "several_losses", "build_autoencoder"),
        Program("adversarial", "several_losses", "build_adversarial"),
    ]


PROGRAMS: dict[str, Program] = {program.name: program for program in _all()}
"""Every program, by name."""

_VARIANTS = ("_documented", "_float64", "_keywords", "_sgd", "_static", "_time_first")


def is_variant(program: Program) -> bool:
    """Whether it is another one with another optimizer or dtype, or called in another way."""
    return program.name.endswith(_VARIANTS)


ONE_LAYER = frozenset({"generation"})
"""Programs that cannot be cut into stages: all of their work is one loop over time."""
