"""What a state is made of: kinds of values such as parameters and moments, and parts of the model.

A plan does not know which of its paths are which. Kinds of values are on every stage that has
state, parts of a model are where they run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from autopar.base.plan_records import PlanRecord
from autopar.report.path_folding import fold_paths, short_path

_MAX_KINDS = 5
"""Of the state; where it has more parts, they are layers and not kinds of values."""


def input_categories(plan: PlanRecord) -> dict[str, str]:
    """A name for what each input belongs to: the kind of values in the state, or its role.

    The kind is the first name by which paths of the state differ: `params` of `state/params/w`. A
    number is no name: of `state/0/w` it is `state/0`, but layers alike are one kind, `layers`.
    Parts of a model are no kinds, so a state of parameters alone has only its role.
    """
    parts = _parts(plan)
    state = {parts[tensor.path] for tensor in plan.inputs if tensor.role == "state"}
    if len(state) > _MAX_KINDS or _largest_kind(plan, parts) is None:
        return {tensor.path: tensor.role for tensor in plan.inputs}
    return parts


def stage_contents(plan: PlanRecord) -> tuple[tuple[str, ...], ...]:
    """For each stage, folded names of the parts of the model that are stored there.

    They are names below the first large kind of values in the state, and as long as it takes to
    tell stages apart: `block_{0..5}` of `state/params/block_0/kernel`.
    """
    parts = _parts(plan)
    kind = _largest_kind(plan, parts)
    state = [tensor for tensor in plan.inputs if tensor.role == "state"]
    model = [tensor for tensor in state if kind is None or parts[tensor.path] == kind]
    paths = [short_path(tensor.path).split("/") for tensor in model]
    common = _num_common([path[:-1] for path in paths])
    homes: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for tensor, path in zip(model, paths, strict=True):
        for end in range(common + 1, len(path) + 1):
            homes.setdefault(tuple(path[:end]), set()).add(tensor.stages)
    names: list[dict[str, None]] = [{} for _ in plan.stages]
    # A number alone says nothing: `layers/3`.
    first = max(common - any(path[common][0].isdigit() for path in paths), 0)
    for tensor, path in zip(model, paths, strict=True):
        ends = range(common + 1, len(path))
        end = next((end for end in ends if len(homes[tuple(path[:end])]) == 1), len(path))
        for stage in tensor.stages:
            names[stage]["/".join(path[first:end])] = None
    return tuple(tuple(fold_paths(here)) for here in names)


def _parts(plan: PlanRecord) -> dict[str, str]:
    """For each input, the first name by which paths of the state differ, or its role."""
    state = [short_path(t.path).split("/") for t in plan.inputs if t.role == "state"]
    common = _num_common(state)
    common -= _are_layers(state, common)
    parts = {}
    for tensor in plan.inputs:
        names = short_path(tensor.path).split("/")
        is_part = tensor.role == "state" and len(names) > common + 1
        is_number = is_part and common > 0 and names[common].isdigit()
        part = "/".join(names[common - is_number : common + 1])
        parts[tensor.path] = part if is_part else tensor.role
    return parts


def _largest_kind(plan: PlanRecord, parts: dict[str, str]) -> str | None:
    """The first part with a tenth of the state, or None where parts are parts of one model.

    Of a model, arrays stand beside the layers, parts have names with numbers (`block_3`), or one
    is on other stages than another.
    """
    state = [tensor for tensor in plan.inputs if tensor.role == "state"]
    sizes: Counter[str] = Counter()
    for tensor in state:
        sizes[parts[tensor.path]] += tensor.bytes
    large = [name for name, size in sizes.items() if 10 * size >= sizes.total()]
    if not large or ("state" in large and len(sizes) > 1):
        return None
    numbered = [name for name in sizes if not name.rpartition("/")[2].isdigit()]
    if len(fold_paths(numbered)) < len(numbered):
        return None
    homes: dict[str, set[int]] = {name: set() for name in sizes}
    for tensor in state:
        if len(tensor.stages) < len(plan.stages):  # a count of steps, a key are on every stage
            homes[parts[tensor.path]].update(tensor.stages)
    first, *others = [homes[name] for name in large]
    is_everywhere = all(stages <= first for stages in homes.values())
    return large[0] if is_everywhere and all(stages == first for stages in others) else None


def _num_common(paths: Sequence[Sequence[str]]) -> int:
    """With how many equal names all of the paths begin."""
    places = (len(set(names)) == 1 for names in zip(*paths, strict=False))
    return sum(itertools.takewhile(bool, places))


def _are_layers(state: Sequence[Sequence[str]], place: int) -> bool:
    """Whether all paths have at this place the number of a layer, and the layers are alike."""
    if not all(len(path) > place + 1 and path[place].isdigit() for path in state):
        return False
    layers: dict[str, set[tuple[str, ...]]] = {}
    for path in state:
        layers.setdefault(path[place], set()).add(tuple(path[place + 1 :]))
    first, *others = layers.values() if layers else [set()]
    # Of an argument itself, (parameters, momentum) are alike as well.
    return all(first == other for other in others) and place > 0 and (place > 1 or len(layers) > 3)
