"""Which programs are planned with which options, on which clusters."""

from __future__ import annotations

from typing import Any

import autopar

_BALANCED: dict[str, Any] = {
    "name": "balanced",
    "num_nodes": 1,
    "devices_per_node": 8,
    "device": {
        "name": "small",
        "memory_bytes": 2**30,
        "memory_bandwidth": 1e10,
        "peak_flops": {"bfloat16": 2e10, "float32": 1e10, "float64": 5e9},
        "max_efficiency": 1.0,
        "kernel_seconds": 1e-6,
    },
    "intra_node": {"bandwidth": 1e9, "latency": 1e-6},
    "inter_node": {"bandwidth": 1e8, "latency": 1e-5},
    "collective_seconds": 2e-6,
    "source": "by hand: communication of a tiny program takes about as long as its computation, as "
    "that of a real program does on a real cluster, so choices are close and a price that changes "
    "shows",
}

CLUSTERS: dict[str, autopar.Cluster] = {
    "balanced": autopar.Cluster.from_dict(_BALANCED),
    "two nodes": autopar.Cluster.from_dict(
        {**_BALANCED, "name": "two nodes", "num_nodes": 2, "devices_per_node": 4}
    ),
    "six": autopar.Cluster.from_dict({**_BALANCED, "name": "six", "devices_per_node": 6}),
    "cpu": autopar.Cluster.preset("cpu", devices_per_node=8),
    "dgx-h100": autopar.Cluster.preset("dgx-h100", nodes=2),
}
"""All are described in full: nothing depends on the machine that plans."""


def one_at_a_time(num_meshes: int, num_microbatches: int) -> list[list[tuple[Any, ...]]]:
    """A schedule as a user may write it: every mesh alternates forward and backward."""
    order = [task for m in range(num_microbatches) for task in (("F", m), ("B", m))]
    return [[(kind, stage, m) for kind, m in order] for stage in range(num_meshes)]


OPTIONS: dict[str, dict[str, Any]] = {
    # one mesh
    "cpu": {"cluster": "cpu"},
    "auto": {},
    "data": {"method": "data"},
    "zero1": {"method": "zero1", "logical_mesh": (8,)},
    "zero2": {"method": "zero2", "microbatches": 4},
    "zero3": {"method": "zero3", "microbatches": 2},
    "shard": {"method": "shard", "logical_mesh": (2, 4)},
    "cube": {"method": "shard", "logical_mesh": (2, 2, 2), "microbatches": 2},
    "keep": {"donate_argnums": ()},
    "hosts": {"cluster": "dgx-h100", "stages": 1, "method": "zero2", "offload": "optimizer"},
    # several meshes
    "1f1b": {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
    "zb_h1": {"stages": 2, "microbatches": 4, "schedule": "zb_h1"},
    "zb_h2": {"stages": 4, "microbatches": 8, "schedule": "zb_h2"},
    "gpipe": {"stages": 4, "microbatches": 4, "schedule": "gpipe", "method": "data"},
    "eager": {"stages": 2, "microbatches": 4, "schedule": "eager_1f1b", "method": "zero3"},
    "chunks": {"stages": 2, "microbatches": 8, "schedule": "interleaved_1f1b", "num_chunks": 2},
    "inference": {"stages": 2, "microbatches": 4, "schedule": "inference"},
    "own": {"stages": 2, "microbatches": 4, "schedule": one_at_a_time},
    "any": {"stages": 2},
    "cut": {"stages": (1, 2), "microbatches": 4, "cluster": "six"},
    "remat": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "remat": "full"},
    "remat_zb": {"stages": 2, "microbatches": 4, "schedule": "zb_h1", "remat": "full"},
    "keep_1f1b": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "donate_argnums": ()},
    # one or several, as the planner decides
    "h100": {"cluster": "dgx-h100", "stages": "auto"},
    "nodes": {"cluster": "two nodes", "stages": "auto"},
}
"""By name, options of `autopar.plan` and the name of the cluster, by default "balanced"."""

PLANNED: dict[str, str] = {
    "mlp": "cpu auto data zero1 zero2 zero3 shard keep 1f1b zb_h1 gpipe own cut remat h100",
    "mlp_float64": "auto",
    "mlp_keywords": "auto 1f1b",
    "mlp_static": "auto 1f1b",
    "mlp_multi_steps": "auto zero2 1f1b zb_h1",
    "cnn": "cpu auto zero2 shard 1f1b zb_h1 chunks nodes",
    "cnn_batch_norm": "auto zero2 1f1b h100",
    "linen_gpt": "cpu auto data zero1 zero2 zero3 shard cube 1f1b zb_h1 zb_h2 chunks eager any "
    "remat remat_zb keep_1f1b h100 nodes",
    "linen_gpt_sgd": "1f1b",
    "nnx_transformer": "auto zero2 1f1b zb_h1",
    "nnx_graphdef": "auto zero3 1f1b zb_h1 chunks",
    "equinox_transformer": "cpu auto zero2 1f1b zb_h1",
    "equinox_documented": "auto eager",
    "haiku_resnet": "cpu auto 1f1b",
    "haiku_resnet_eval": "auto zero2 inference",
    "hf_gpt2": "cpu auto zero2 1f1b zb_h1 zb_h2 nodes",
    "hf_bert": "auto zero2 1f1b",
    "hf_vit": "auto zero3 zb_h1",
    "scan_layers": "cpu auto data zero2 zero3 shard cube keep 1f1b zb_h1 zb_h2 gpipe chunks cut "
    "remat nodes",
    "scan_layers_linen": "auto zero2 1f1b zb_h1",
    "lstm": "cpu auto zero2 shard 1f1b zb_h1 zb_h2 chunks any remat",
    "lstm_time_first": "auto 1f1b",
    "lstm_linen": "auto zero2 1f1b",
    "moe_one_hot": "cpu auto zero2 shard 1f1b zb_h1 remat_zb nodes",
    "moe_sort": "auto zero2 1f1b zb_h1",
    "moe_one_hot_batch": "auto shard 1f1b",
    "moe_sort_batch": "auto shard zero2",
    "unet": "cpu auto zero2 1f1b zb_h1 remat",
    "graph_network": "cpu auto zero2 shard 1f1b zb_h1",
    "token_weighted": "auto data zero2 cube 1f1b zb_h1 remat any",
    "token_weighted_float64": "auto",
    "two_views": "auto zero2 1f1b zb_h1",
    "loss_scale_where": "auto zero2 1f1b zb_h1",
    "loss_scale_cond": "auto zero2 1f1b zb_h1 gpipe",
    "bfloat16": "cpu auto zero2 hosts 1f1b zb_h1 nodes",
    "bfloat16_scan": "auto zero2 zero3 1f1b zb_h1 remat",
    "ema": "auto zero2 1f1b zb_h1 keep_1f1b",
    "contrastive": "auto shard zero2 h100",
    "custom_vjp": "auto zero2 1f1b zb_h1 remat_zb",
    "per_example_metrics": "auto zero2 1f1b zb_h1",
    "per_example_gradients": "auto zero2 1f1b zb_h1",
    "key_typed": "auto zero2 1f1b remat",
    "key_raw": "auto zero2 zb_h1",
    "key_rbg": "auto zero2 1f1b",
    "key_per_example": "auto zero2 1f1b zb_h1",
    "leaf_kinds": "cpu auto zero2 keep 1f1b zb_h1",
    "debug_print": "auto zero2 1f1b",
    "batch_shapes": "cpu auto zero2 shard 1f1b zb_h1 chunks",
    "evaluation": "auto zero2 inference 1f1b",
    "generation": "cpu auto data zero2 1f1b",
    "autoencoder": "auto zero2 1f1b zb_h1 gpipe",
    "adversarial": "auto zero2 1f1b zb_h1",
}
"""For each program of the registry (but other forms of a program), names from `OPTIONS`."""

KIB = 1024
_TWO_STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}

SPECIAL: dict[str, dict[str, dict[str, Any]]] = {
    "mlp": {
        "pins": {"pins": {"state*[0]*['w']": (None, "x"), "state*[1]['b']": ("x",)}},
        "pin_unknown": {"pins": {"*kernel*": ("x",)}},
        "no_memory": {"memory_limit": 2 * KIB},
        "no_microbatches": {"microbatches": 5},
    },
    "linen_gpt": {
        "pins": {
            "method": "shard",
            "logical_mesh": (4, 2),
            "pins": {"*Dense_0*kernel*": (None, "y"), "state.params*key*kernel*": ("x",)},
        },
        "pins_1f1b": {**_TWO_STAGES, "pins": {"*Dense_0*kernel*": (None, "x")}},
        "pin_uneven": {"pins": {"*Embed_0*": ("x",)}},
        "memory": {"memory_limit": 600 * KIB},
        "memory_less": {"memory_limit": 200 * KIB},
        "memory_remat": {**_TWO_STAGES, "memory_limit": 350 * KIB},
        "no_memory_1f1b": {**_TWO_STAGES, "memory_limit": 100 * KIB},
    },
    "scan_layers": {
        "pins": {"method": "shard", "logical_mesh": (4, 2), "pins": {"*['mlp']*": (None, "y")}},
        "memory": {"memory_limit": 500 * KIB},
        "memory_remat": {**_TWO_STAGES, "memory_limit": 440 * KIB},
    },
    "moe_one_hot": {
        "pins": {"pins": {"*['up']": ("x",), "*['down']": ("x",)}},
        "memory": {"memory_limit": 150 * KIB},
        "memory_nodes": {"memory_limit": 150 * KIB, "cluster": "two nodes"},
    },
    "bfloat16": {"memory_nodes": {"memory_limit": 120 * KIB, "cluster": "two nodes"}},
}
"""Options that are for one program alone: names of its leaves, and memory that binds."""

QUICK: dict[str, str] = {
    "mlp": "auto cpu shard zero2 cut own pins no_memory no_microbatches",
    "mlp_static": "auto",
    "cnn_batch_norm": "zero2",
    "lstm": "1f1b remat",
    "moe_one_hot": "pins",
    "scan_layers": "memory",
    "two_views": "auto",
    "loss_scale_cond": "gpipe",
    "ema": "keep_1f1b",
    "contrastive": "h100",
    "custom_vjp": "remat_zb",
    "per_example_gradients": "zb_h1",
    "key_typed": "1f1b",
    "leaf_kinds": "keep",
    "batch_shapes": "chunks",
    "evaluation": "inference",
    "generation": "1f1b",
    "autoencoder": "zb_h1",
}
"""The plans that are compared by default; all others are for `make test-all` and the command."""
