"""Options are checked when made, and equal requests are equal objects with equal JSON."""

import doctest
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.base import options, units
from autopar.base.errors import OptionError, PinError
from autopar.base.methods import METHODS
from autopar.base.options import Options


def test_docstrings() -> None:
    assert doctest.testmod(options).failed == 0
    assert doctest.testmod(units).failed == 0


def test_defaults_are_what_the_manual_says() -> None:
    made = Options()
    assert (made.method, made.microbatches, made.runtime) == ("auto", "auto", "local")
    assert made.donate_argnums == made.batch_argnums == "auto"
    assert (made.static_argnums, made.pins) == ((), ())
    assert made.memory_limit is None
    assert made.logical_mesh is None
    assert made.solver_time_limit is None
    assert (made.max_flops_share, made.max_bytes_share, made.seed) == (0.01, 0.05, 0)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("microbatches", np.int64(4), 4),
        ("microbatches", "auto", "auto"),
        ("batch_argnums", 1, (1,)),
        ("batch_argnums", [2, 1, 2], (1, 2)),
        ("donate_argnums", (), ()),
        ("donate_argnums", -1, (-1,)),
        ("static_argnums", range(2, 4), (2, 3)),
        ("memory_limit", "12GiB", 12 * 2**30),
        ("memory_limit", "1.5 gb", 1_500_000_000),
        ("memory_limit", "4096", 4096),
        ("memory_limit", 1e9, 10**9),
        ("logical_mesh", [4, 2], (4, 2)),
        ("logical_mesh", 8, (8,)),
        ("solver_time_limit", 3, 3.0),
        ("planning_time_limit", 3, 3.0),
        ("max_flops_share", 0, 0.0),
        ("stages", 1, 1),
        ("stages", None, "auto"),
        ("stages", 4, 4),
        ("stages", [3, 6], (3, 6)),
        ("stages", np.arange(1, 4), (1, 2, 3)),
        ("stages", np.int64(2), 2),
        ("remat", "none", "none"),
        ("constraints", "ignore", "ignore"),
        ("reduce_dtype", "float32", "float32"),
        ("num_chunks", 1, 1),
    ],
)
def test_values_are_brought_to_one_form(name: str, given: Any, kept: Any) -> None:
    made = getattr(Options.from_kwargs(**{name: given}), name)
    assert made == kept
    assert type(made) is type(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("microbatches", 0),
        ("microbatches", -4),
        ("microbatches", 2.0),
        ("microbatches", True),
        ("microbatches", "many"),
        ("constraints", "pins"),
        ("reduce_dtype", "float16"),
        ("batch_argnums", "first"),
        ("batch_argnums", 1.5),
        ("static_argnums", "auto"),
        ("donate_argnums", {0: 1}),
        ("logical_mesh", (2, 2, 2, 2)),
        ("logical_mesh", ()),
        ("logical_mesh", (0, 8)),
        ("logical_mesh", "4x2"),
        ("memory_limit", 0),
        ("memory_limit", -1),
        ("memory_limit", float("inf")),
        ("memory_limit", float("nan")),
        ("memory_limit", "12 gallons"),
        ("memory_limit", True),
        ("max_flops_share", 1.5),
        ("max_bytes_share", "half"),
        ("solver_time_limit", 0),
        ("planning_time_limit", 0),
        ("seed", -1),
        ("seed", 0.5),
        ("progress", "yes"),
        ("runtime", "slurm"),
        ("runtime", 3),
        ("method", 3),
        ("stages", 0),
        ("stages", True),
        ("stages", "two"),
        ("stages", 1.5),
        ("stages", []),
        ("stages", [6, 3]),
        ("stages", [3, 3]),
        ("stages", np.arange(3)),
        ("schedule", "2f2b"),
        ("schedule", 3),
        ("num_chunks", 2),  # with one stage
        ("num_chunks", 0),
        ("remat", "some"),
        ("pins", "x"),
        ("pins", 3),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        Options.from_kwargs(**{name: value})
    assert caught.value.why


def test_one_stage_has_no_schedule() -> None:
    with pytest.raises(OptionError, match="one stage has no pipeline"):
        Options(stages=1, schedule="1f1b")
    assert Options(schedule="1f1b").stages == "auto"
    with pytest.raises(OptionError, match="one stage on every mesh"):
        Options(schedule="interleaved_1f1b")


def test_a_misspelt_schedule_gets_the_closest() -> None:
    with pytest.raises(OptionError, match="did you mean 'zb_h1'"):
        Options(stages=2, schedule="zb-h1")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"stages": 2, "schedule": "1F1B"}, "did you mean '1f1b'?"),
        ({"runtime": "Ray"}, "did you mean 'ray'?"),
        ({"microbatches": "8"}, "write microbatches=8."),
        ({"stages": " 2"}, "write stages=2."),
        ({"stages": "08"}, "write stages=8."),
        ({"microbatches": "many"}, None),
        ({"microbatches": "0"}, None),
    ],
)
def test_what_was_probably_meant(options: dict[str, Any], hint: str | None) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**options)
    assert caught.value.hint == hint


def test_a_schedule_may_be_a_function() -> None:
    def all_forward_first(num_meshes: int, num_microbatches: int) -> list[list[tuple[Any, ...]]]:
        raise AssertionError("options do not call it")

    options = Options(stages=2, schedule=all_forward_first)
    assert options.schedule is all_forward_first
    assert "all_forward_first" in options.to_dict()["schedule"]


def test_pipelining_is_no_method() -> None:
    with pytest.raises(OptionError, match="stages=2"):
        Options(method="pipeline")


def test_ray_by_name_is_ray_as_it_is() -> None:
    assert Options(runtime="ray") == Options(runtime=autopar.Ray())
    assert Options(runtime=autopar.Ray(deadline=5)).to_json() == Options().to_json()
    with pytest.raises(OptionError, match=r"write autopar.Ray\(\)"):
        Options(runtime=autopar.Ray)  # type: ignore[arg-type]


def test_an_unknown_option_gets_the_list_and_the_closest() -> None:
    with pytest.raises(OptionError, match="did you mean 'microbatches'") as caught:
        Options.from_kwargs(micro_batches=4)
    assert all(name in str(caught.value) for name in Options.names())


def test_an_unknown_method_gets_the_list_and_the_closest() -> None:
    with pytest.raises(OptionError, match="did you mean 'zero3'") as caught:
        Options(method="zero-3")
    assert all(name in str(caught.value) for name in METHODS)


@pytest.mark.parametrize("other", ["batch_argnums", "donate_argnums"])
def test_a_static_argument_is_no_buffer(other: str) -> None:
    with pytest.raises(OptionError, match="Argument 1 is named in both"):
        Options.from_kwargs(static_argnums=(1, 2), **{other: (0, 1)})


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(None, ("x", "y"), None),
        (None, ("x", "y")),
        [None, ["x", "y"]],
        ((), ("x", "y"), ()),
    ],
)
def test_pins_take_partition_specs_and_what_looks_like_them(spec: Any) -> None:
    assert Options.from_kwargs(pins={"a/*": spec}).pins == (("a/*", ((), ("x", "y"))),)


def test_pins_in_any_order_are_equal() -> None:
    one = Options.from_kwargs(pins={"a": ("x",), "b": ()})
    two = Options.from_kwargs(pins={"b": (None,), "a": ("x",)})
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"a": ("x", "x")}, "axis 'x' twice"),
        ({"a": "x"}, "'x' for its sharding"),
        ({"a": (1,)}, "1 for one of its dimensions"),
        ({"a": PartitionSpec(PartitionSpec.UNCONSTRAINED)}, "one of its dimensions"),
        ({"": ("x",)}, "path pattern"),
        ({3: ("x",)}, "path pattern"),
        ([("a", ("x",)), ("a", ("y",))], "conflict"),
    ],
)
def test_malformed_pins_are_refused(pins: Any, message: str) -> None:
    with pytest.raises(PinError, match=message):
        Options.from_kwargs(pins=pins)


def test_json_is_canonical_and_leaves_out_what_does_not_plan() -> None:
    made = Options.from_kwargs(
        pins={"b": ("x",), "a": (None, ("x", "y"))}, memory_limit="1KiB", progress=True
    )
    assert '"pins":{"a":[[],["x","y"]],"b":[["x"]]}' in made.to_json()
    assert '"memory_limit":1024' in made.to_json()
    assert made.to_json() == Options.from_kwargs(pins=dict(made.pins), memory_limit=1024).to_json()
    assert Options(seed=1).to_json() != Options().to_json()


Batch = namedtuple("Batch", "x y")


class Model:
    """An object whose fields are axes, as a registered pytree class would be."""

    def __init__(self, weight: int | None):
        self.weight = weight


@pytest.mark.parametrize("axes", [None, 0, (None, 0), [1, {"x": 0, "y": (None, 2)}]])
def test_options_go_through_json(axes: Any) -> None:
    made = Options.from_kwargs(
        batch_axes=axes, logical_mesh=(4, 2), pins={"a": ("x",)}, donate_argnums=(0,)
    )
    assert Options.from_dict(made.to_dict()) == made
    hash(made)


def test_equal_batch_axes_of_any_class_have_equal_json() -> None:
    def json_of(axes: Any) -> str:
        return Options(batch_axes=axes).to_json()

    assert json_of(Model(0)) == json_of(Model(0)) != json_of(Model(None))
    assert json_of(Batch(0, None)) == json_of(Batch(0, None)) != json_of((0, None))
    with pytest.raises(OptionError, match="Model"):
        Options.from_dict(Options(batch_axes=Model(0)).to_dict())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fsdp", "method='zero3'"),
        ("FSDP2", "method='zero3'"),
        ("DDP", "method='data'"),
        ("tensor-parallel", "method='megatron'"),
        ("fsdp+tp", "megatron.*logical_mesh"),
        ("PP", "stages=2"),
        ("gpipe", "stages=2"),
    ],
)
def test_other_names_of_methods_are_told_ours(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){hint}"):
        Options(method=name)


@pytest.mark.parametrize("text", ["80 gigs", "80G", "80 gigabytes", "0.5t"])
def test_sizes_of_memory_are_spelt_out(text: str) -> None:
    with pytest.raises(OptionError, match=r"write '.*iB'"):
        Options.from_kwargs(memory_limit=text)


@pytest.mark.parametrize(
    ("name", "told"), [("plan", "autopar.compile"), ("clusters", "autopar.scaling")]
)
def test_options_of_other_functions_say_of_which(name: str, told: str) -> None:
    with pytest.raises(autopar.errors.OptionError) as caught:
        autopar.plan(lambda x: x, 1.0, cluster="1x8 h100", **{name: None})
    assert caught.value.hint is not None and told in caught.value.hint
