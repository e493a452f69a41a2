"""Mixtures without capacities, as people write them, and what looks like them and is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.steps import arrays, shaped

EXPERTS, WIDTH, HIDDEN, TOP = 4, 8, 16, 2
EXAMPLES, TOKENS = 16, 5
SHAPES = {
    "scale": shaped(WIDTH),
    "router": shaped(WIDTH, EXPERTS),
    "gate": shaped(EXPERTS, WIDTH, HIDDEN),
    "up": shaped(EXPERTS, WIDTH, HIDDEN),
    "down": shaped(EXPERTS, HIDDEN, WIDTH),
    "bias": shaped(EXPERTS, WIDTH),
    "hidden_bias": shaped(HIDDEN),
}
Weights = dict[str, Any]
Rows = Any


def some_weights() -> Weights:
    return jax.tree.map(lambda w: 0.3 * w, arrays(SHAPES))


def routed(weights: Weights, rows: Rows) -> tuple[Any, Any]:
    return lax.top_k(jax.nn.softmax(rows @ weights["router"]), TOP)


def experts(weights: Weights, rows: Rows, sizes: Any) -> Rows:
    hidden = jax.nn.silu(lax.ragged_dot(rows, weights["gate"], sizes))
    hidden = hidden * lax.ragged_dot(rows, weights["up"], sizes)
    return lax.ragged_dot(hidden, weights["down"], sizes)


def back_by_set(weights: Weights, rows: Rows) -> Rows:
    gates, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    made = experts(weights, rows[order // TOP], sizes)
    made = jnp.zeros_like(made).at[order].set(made)
    return jnp.einsum("rkd,rk->rd", made.reshape(-1, TOP, WIDTH), gates)


def back_by_rank(weights: Weights, rows: Rows) -> Rows:
    """As MaxText permutes and unpermutes."""
    gates, chosen = routed(weights, rows)
    flat = jnp.ravel(chosen)
    order = jnp.argsort(flat)
    taken = jnp.take(rows, indices=order // TOP, axis=0)
    made = experts(weights, taken, jnp.bincount(flat, length=EXPERTS))
    made = jnp.take(made, indices=jnp.argsort(order), axis=0)
    return jnp.einsum("rkd,rk->rd", made.reshape(-1, TOP, WIDTH), gates)


def back_by_sums(weights: Weights, rows: Rows) -> Rows:
    """Gates on sorted rows, which are added to their tokens; rows are repeated before."""
    gates, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1), stable=False)
    sizes = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=(0, 1))
    made = experts(weights, jnp.repeat(rows, TOP, axis=0)[order], sizes)
    made = made * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // TOP].add(made)


def with_biases(weights: Weights, rows: Rows) -> Rows:
    """Biases of experts and of all, normalization of sorted rows, a sum over them."""
    chosen = jnp.argmax(rows @ weights["router"], axis=-1).astype(jnp.int32)
    sorted_chosen, order = lax.sort_key_val(chosen, jnp.arange(len(rows)))
    sizes = (chosen[:, None] == jnp.arange(EXPERTS)).sum(0).astype(jnp.int32)
    hidden = lax.ragged_dot(rows[order], weights["up"], sizes) + weights["hidden_bias"]
    hidden = jax.nn.standardize(jnp.concatenate([hidden, -hidden], -1))[:, :HIDDEN]
    made = lax.ragged_dot(jnp.tanh(hidden), weights["down"], sizes)
    made = made + weights["bias"][sorted_chosen]
    return made[jnp.argsort(order)] + 0.1 * jnp.sum(made**2) / rows.size


def with_padding(weights: Weights, rows: Rows) -> Rows:
    """Some tokens go nowhere: their expert is one too many. Counts are used beside."""
    _, chosen = routed(weights, rows)
    chosen = jnp.where(rows[:, :1] > 0.5, EXPERTS, chosen).reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[chosen].add(1, mode="drop")
    made = experts(weights, rows[order // TOP], sizes)[jnp.argsort(order)]
    balance = jnp.sum((sizes / len(order)) * jax.nn.softmax(rows @ weights["router"]).mean(0))
    return made.reshape(-1, TOP, WIDTH).sum(1) + balance


FORMS: dict[str, Callable[[Weights, Rows], Rows]] = {
    form.__name__: form
    for form in (back_by_set, back_by_rank, back_by_sums, with_biases, with_padding)
}


def loss_of(form: Callable[[Weights, Rows], Rows], layers: str = "one") -> Any:
    def layer(x: Any, scale: Any, weights: Weights) -> Any:
        rows = (x * scale).reshape(-1, WIDTH)
        return x + form(weights, rows).reshape(x.shape)

    def loss(weights: Weights, x: Any) -> Any:
        scales = jnp.stack([weights["scale"], weights["scale"] + 1])
        if layers == "one":
            x = layer(x, weights["scale"], weights)
        elif layers == "unrolled":
            for scale in scales:
                x = layer(x, scale, weights)
        else:

            def body(x: Any, scale: Any) -> Any:
                return layer(x, scale, weights), None

            x, _ = lax.scan(jax.checkpoint(body) if layers == "remat" else body, x, scales)
        return jnp.mean(x**2)

    return loss


def step_of(loss: Any) -> Any:
    def step(weights: Weights, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def some_rows() -> Any:
    return arrays(shaped(EXAMPLES, TOKENS, WIDTH))


def plain_experts(weights: Weights, rows: Rows, sizes: Any) -> Rows:
    """Without a gate: what XLA compiles is mostly grouped products, and these forms are not."""
    hidden = jax.nn.silu(lax.ragged_dot(rows, weights["up"], sizes))
    return lax.ragged_dot(hidden, weights["down"], sizes)


def by_position(weights: Weights, rows: Rows) -> Rows:
    """What a sorted row gets depends on where it is among all."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes) * jnp.arange(len(order))[:, None]
    return made[jnp.argsort(order)].reshape(-1, TOP, WIDTH).sum(1)


def with_capacity(weights: Weights, rows: Rows) -> Rows:
    """Of each group the first rows alone."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.minimum(jnp.bincount(chosen.reshape(-1), length=EXPERTS), 7).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes)[jnp.argsort(order)]
    return made.reshape(-1, TOP, WIDTH).sum(1)


def of_other_counts(weights: Weights, rows: Rows) -> Rows:
    """Sizes that count something else, as often as there are rows."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    other = (chosen.reshape(-1) + 1) % EXPERTS
    sizes = jnp.bincount(other, length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes)[jnp.argsort(order)]
    return made.reshape(-1, TOP, WIDTH).sum(1)


def of_unknown_keys(weights: Weights, rows: Rows) -> Rows:
    """Keys of which nobody knows that they are experts."""
    chosen = jnp.round(rows[:, 0] * 3).astype(jnp.int32)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    return plain_experts(weights, rows[order], sizes)[jnp.argsort(order)]


def across_examples(weights: Weights, rows: Rows) -> Rows:
    """Each row gets what its neighbour's expert made."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[(order // TOP + 1) % len(rows)], sizes)[jnp.argsort(order)]
    return made.reshape(-1, TOP, WIDTH).sum(1)


def of_neighbours(weights: Weights, rows: Rows) -> Rows:
    """Sorted rows are mixed with those beside them."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, jnp.cumsum(rows[order // TOP], axis=0), sizes)[jnp.argsort(order)]
    return made.reshape(-1, TOP, WIDTH).sum(1)


def sorted_back(by: Callable[[Any], Any]) -> Any:
    """The way back is a sort of something else that is made of the order."""

    def form(weights: Weights, rows: Rows) -> Rows:
        _, chosen = routed(weights, rows)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
        made = plain_experts(weights, rows[order // TOP], sizes)[jnp.argsort(by(order))]
        return made.reshape(-1, TOP, WIDTH).sum(1)

    return form


def backwards(weights: Weights, rows: Rows) -> Rows:
    return sorted_back(lambda order: -order)(weights, rows)


def by_remainders(weights: Weights, rows: Rows) -> Rows:
    return sorted_back(lambda order: order % 5)(weights, rows)


def by_choice_first(weights: Weights, rows: Rows) -> Rows:
    count = len(rows)
    return sorted_back(lambda order: (order % TOP) * count + order // TOP)(weights, rows)


def into_fewer_places(weights: Weights, rows: Rows) -> Rows:
    """Rows that find no place are dropped, of all examples together."""
    made = back_by_rank(weights, rows)
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    places = jnp.zeros((len(order) // 2, WIDTH), rows.dtype)
    placed = places.at[jnp.argsort(order)].set(jnp.repeat(rows, TOP, 0), mode="drop")
    return made + (placed**2).sum(0)


def into_more_places(weights: Weights, rows: Rows) -> Rows:
    """A mask of what was put: not all of it is true."""
    made = back_by_rank(weights, rows)
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    put = jnp.zeros(2 * len(order), jnp.int32).at[order].set(jnp.arange(len(order)) + 1)
    return made * jnp.where(put > 0, 1.0, 3.0).sum()


def of_present_experts(weights: Weights, rows: Rows) -> Rows:
    """Sizes that say whether there are rows, not how many."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(bool).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes)[jnp.argsort(order)]
    return made.reshape(-1, TOP, WIDTH).sum(1)


def of_reversed_tokens(weights: Weights, rows: Rows) -> Rows:
    """Each choice has another token's number, of another example."""
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    token = jnp.repeat(len(rows) - 1 - jnp.arange(len(rows)), TOP)[order]
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    return jnp.zeros_like(rows).at[token].add(plain_experts(weights, rows[token], sizes))


def of_compared_keys(weights: Weights, rows: Rows) -> Rows:
    """Which rows have the key that was there before they were sorted."""
    chosen = jnp.argmax(rows @ weights["router"], axis=-1).astype(jnp.int32)
    ordered, order = lax.sort_key_val(chosen, jnp.arange(len(rows)))
    sizes = jnp.sum((ordered == chosen)[:, None] * jax.nn.one_hot(chosen, EXPERTS), 0)
    return plain_experts(weights, rows[order], sizes.astype(jnp.int32))[jnp.argsort(order)]


def of_no_bounds(weights: Weights, rows: Rows) -> Rows:
    """Keys that are clamped to nothing: all are -1."""
    chosen = lax.clamp(0, jnp.argmax(rows @ weights["router"], -1).astype(jnp.int32), -1)
    order = jnp.argsort(chosen)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[jnp.maximum(chosen, 0)].add(1)
    return plain_experts(weights, rows[order], sizes)[jnp.argsort(order)]


def with_inverse_by_scatter(weights: Weights, rows: Rows) -> Rows:
    gates, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    made = plain_experts(weights, rows[order // TOP], sizes)[back]
    return jnp.einsum("rkd,rk->rd", made.reshape(-1, TOP, WIDTH), gates)


def with_sorted_order(weights: Weights, rows: Rows) -> Rows:
    """The sorted order is read: it is that of places."""
    made = back_by_rank(weights, rows)
    _, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    places, _ = lax.sort_key_val(order, jnp.arange(len(order)))
    return made * jnp.cos(places[: len(rows)].astype(jnp.float32))[:, None]


def with_sorted_promise(weights: Weights, rows: Rows) -> Rows:
    """Sums by expert, with the promise that indices are sorted, which they are no longer."""
    gates, chosen = routed(weights, rows)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes)
    sums = jax.ops.segment_sum(made, flat[order], EXPERTS, indices_are_sorted=True)
    made = made[jnp.argsort(order)].reshape(-1, TOP, WIDTH)
    return jnp.einsum("rkd,rk->rd", made, gates) + 0.1 * jnp.tanh(sums.mean(0))


def with_token_numbers(weights: Weights, rows: Rows) -> Rows:
    """The number of each choice's token, in order: as programs for other frameworks have it."""
    gates, chosen = routed(weights, rows)
    order = jnp.argsort(chosen.reshape(-1))
    token = jnp.take(jnp.repeat(jnp.arange(len(rows)), TOP), order)
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, jnp.take(rows, token, axis=0), sizes)
    made = made * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[token].add(made)


def with_sorted_tokens(weights: Weights, rows: Rows) -> Rows:
    """Tokens and gates are sorted with their experts, and the sorted experts are counted."""
    gates, chosen = routed(weights, rows)
    token = jnp.repeat(jnp.arange(len(rows)), TOP)
    sort = chosen.reshape(-1), token, gates.reshape(-1)
    experts_sorted, token, gate = lax.sort(sort, num_keys=1)
    sizes = jnp.bincount(experts_sorted, length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[token], sizes) * gate[:, None]
    made = made + weights["bias"][experts_sorted]
    return jnp.zeros_like(rows).at[token].add(made)


def with_counts_of_sorted(weights: Weights, rows: Rows) -> Rows:
    gates, chosen = routed(weights, rows)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat[order], length=EXPERTS).astype(jnp.int32)
    made = plain_experts(weights, rows[order // TOP], sizes)[jnp.argsort(order)]
    return jnp.einsum("rkd,rk->rd", made.reshape(-1, TOP, WIDTH), gates)
