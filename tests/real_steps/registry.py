"""The entries: which file builds a step, and what must be refused of it, with the reason."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import jax_releases
from programs import Case, Tolerance

_BY_DTYPE = Tolerance()
_BFLOAT16 = Tolerance(relative=5e-2 if jax_releases.IS_OURS else 1.5e-1)
"""With JAX 0.12 plain `jax.jit` itself differs so between one device and eight, by up to 0.112."""

_BIAS_BEFORE_NORM = Tolerance(zero_gradients=("['conv1']['bias']", ".conv1.bias"))
_LAST_BIAS = Tolerance(zero_gradients=("['items'][1][1]",))
"""One bias for all items of a softmax changes nothing."""


@dataclass(frozen=True)
class RealStep:
    """One step of the registry.

    Args:
        name: what tests and reports call it.
        module: the file of this folder that defines it.
        function: the function of that file that builds its `Case`.
        settings: keyword arguments of that function.
        whole: why it cannot be split into microbatches, as a fragment of the error, or None.
        one_mesh: why it cannot be cut into stages, as a fragment of the error, or None.
        rows_meet: whether its rows meet in the middle of the step, so that its stages take one
            microbatch, and more are refused.
        tolerance: how its runs are compared.
    """

    name: str
    module: str
    function: str = "build"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    whole: str | None = None
    one_mesh: str | None = None
    rows_meet: bool = False
    tolerance: Tolerance = _BY_DTYPE

    def __str__(self) -> str:
        return self.name

    def build(self) -> Case:
        """Imports the step's file and builds it."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        case: Case = getattr(module, self.function)(**self.settings)
        return case


def _decoder(name: str, tolerance: Tolerance = _BY_DTYPE, **settings: Any) -> RealStep:
    return RealStep(f"decoder_{name}", "language", settings=settings, tolerance=tolerance)


def _whole_batch(name: str, tolerance: Tolerance = _BY_DTYPE) -> RealStep:
    """A step of several loops over its microbatches."""
    return RealStep(name, "losses", f"build_{name}", rows_meet=True, tolerance=tolerance)


def _all() -> list[RealStep]:
    bfloat16 = {"dtype": jnp.bfloat16, "tolerance": _BFLOAT16}
    return [
        _decoder("remat_full", remat="full"),
        _decoder("remat_dots", remat="dots"),
        _decoder("remat_names", remat="names"),
        _decoder("remat_offload", remat="offload"),
        _decoder("bfloat16", **bfloat16),
        _decoder("bfloat16_scan", scan=True, **bfloat16),
        _decoder("bfloat16_scan_remat", scan=True, remat="full", **bfloat16),
        _decoder("scan_remat_dots", scan=True, remat="dots_no_batch", prevent_cse=False),
        _decoder("scan_remat_names", scan=True, remat="names"),
        RealStep("checkpointed_head", "language", "build_checkpointed_head"),
        RealStep("chunked_head", "language", "build_chunked_head"),
        RealStep("llama", "language", "build_llama"),
        RealStep("flash_attention", "language", "build_attention", {"kind": "flash"}),
        RealStep("jax_attention", "language", "build_attention", {"kind": "jax"}),
        RealStep("inner_jit", "language", "build_inner_jit"),
        RealStep(
            "accumulation_by_hand",
            "language",
            "build_by_hand_accumulation",
            one_mesh="accumulates",
        ),
        RealStep("experts_grouped", "language", "build_experts", {"kind": "grouped"}),
        RealStep("experts_balanced", "language", "build_experts", {"kind": "balanced"}),
        RealStep("state_space", "sequences", "build_state_space"),
        RealStep("linear_attention", "sequences", "build_linear_attention"),
        RealStep("fourier", "sequences", "build_fourier"),
        RealStep("chunked_recurrence", "sequences", "build_chunked_recurrence"),
        RealStep("alignment", "sequences", "build_alignment"),
        RealStep("ode", "sequences", "build_ode"),
        RealStep("solve", "sequences", "build_solve"),
        RealStep("products", "sequences", "build_products"),
        RealStep("graphs", "sequences", "build_graphs", whole="`gather`"),
        RealStep("root_mean", "losses", "build_root_mean"),
        RealStep("dice", "losses", "build_dice"),
        _whole_batch("distillation"),
        _whole_batch("views"),
        _whole_batch("two_towers", _LAST_BIAS),
        _whole_batch("sharpness_aware"),
        _whole_batch("actor_critic", Tolerance(relative=1e-3)),  # differences of close numbers
        RealStep("q_learning", "losses", "build_q_learning"),
        RealStep("policy", "losses", "build_policy"),
        RealStep("codebook", "losses", "build_codebook"),
        RealStep("extremes", "losses", "build_extremes"),
        RealStep("nnx_in_place", "training", "build_in_place"),
        RealStep(
            "nnx_batch_norm",
            "training",
            "build_in_place",
            {"norm": True},
            rows_meet=True,
            tolerance=_BIAS_BEFORE_NORM,
        ),
        RealStep("adapters", "training", "build_adapters", tolerance=Tolerance(relative=1e-1)),
        RealStep("quantized", "training", "build_quantized"),
        RealStep("float8", "training", "build_float8"),
        RealStep("if_finite", "training", "build_if_finite"),
        RealStep("multi_steps", "training", "build_multi_steps"),
        RealStep("dynamic_scale", "training", "build_dynamic_scale"),
        RealStep("muon", "training", "build_muon"),
        RealStep("factored", "training", "build_factored"),
        RealStep("diffusion", "training", "build_diffusion"),
        RealStep("flow", "training", "build_flow"),
        RealStep("physics", "training", "build_physics"),
        RealStep("meta", "training", "build_meta"),
        RealStep("mixup", "training", "build_mixup"),
        RealStep("logical_axes", "training", "build_logical_axes"),
        RealStep("queue", "states", "build_queue"),
        RealStep("adversaries", "states", "build_adversaries"),
        RealStep("small_moments", "states", "build_small_moments"),
        RealStep("delayed_scales", "states", "build_delayed_scales"),
        RealStep("scanned_scales", "states", "build_scanned_scales"),
        RealStep("reversible", "states", "build_reversible"),
    ]


REAL_STEPS: dict[str, RealStep] = {step.name: step for step in _all()}
"""Every step, by name."""
