"""How long XLA's performance model for GPUs thinks that a kernel takes (`compiler_rules`)."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

CYCLES = {
    "add": 7,
    "add_any": 7,
    "atan2": 431,
    "cbrt": 178,
    "cos": 978,
    "div": 19,
    "exp": 79,
    "exp2": 82,
    "expm1": 190,
    "log": 166,
    "log1p": 229,
    "pow": 510,
    "rsqrt": 75,
    "sin": 958,
    "sqrt": 75,
    "sub": 7,
    "tanh": 467,
    # What is no operation of XLA's is made of these.
    "acos": 560,
    "acosh": 330,
    "asin": 560,
    "asinh": 420,
    "atan": 431,
    "atanh": 270,
    "cosh": 180,
    "digamma": 1500,
    "erf": 700,
    "erf_inv": 520,
    "erfc": 700,
    "lgamma": 1500,
    "logistic": 108,
    "rem": 60,
    "sinh": 370,
    "tan": 1955,
    "threefry2x32": 420,
}
"""Of one element of an elementwise primitive in float32, as XLA counts them for an H100
(`hlo_op_profiles_data.h`), for its expansions the sum."""

CYCLES_BY_DEFAULT = 3
CYCLES_PER_SECOND = 2 * 132 * 128 * 1.98e9
"""Of an H100's vector units, two at a time, as XLA has it (`gpu_performance_model_base.cc`)."""

BYTES_PER_SECOND = 3.35e12
"""Of an H100's memory; what decides is the ratio, which is alike on other GPUs."""

OVERLAP = 0.95
"""The share of a kernel's shorter part, of computing and of moving, that the other one hides."""


def cycles(eqn: JaxprEqn) -> int:
    """Of one element of an equation's result."""
    return CYCLES.get(eqn.primitive.name, CYCLES_BY_DEFAULT)


def kernel_seconds(cycles: float, moved_bytes: float) -> float:
    """How long XLA thinks that a kernel takes, but for its launch."""
    compute, memory = cycles / CYCLES_PER_SECOND, moved_bytes / BYTES_PER_SECOND
    return compute + memory - OVERLAP * min(compute, memory)
