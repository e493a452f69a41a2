# mypy: disallow-untyped-defs=False
"""A transformer in Flax NNX, trained through the functional interface (split and merge)."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from . import data
from .case import Case
from .optimizers import adam, clipped_adamw


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    """A decoder with its own output layer."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float, rngs: nnx.Rngs):
        self.embed = nnx.Embed(data.VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (data.LENGTH, width)))
        self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, data.VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_fn(model, inputs, labels):
    """Mean cross entropy, and the logits."""
    logits = model(inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, logits


def build() -> Case:
    """State first: the graph definition is closed over; the dropout's generator is in the state."""
    model = Transformer(32, 2, 2, dropout=0.1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, clipped_adamw(), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        gradient = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, _), grads = gradient(model, batch["inputs"], batch["labels"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return Case(train_step, state, _batches(lambda x, y: ({"inputs": x, "labels": y},)))


def train_step_with_graphdef(graphdef, state, inputs, labels):
    """A step as NNX's guide to performance writes it: the loss and accuracy are metrics objects."""
    model, optimizer, metrics = nnx.merge(graphdef, state)
    gradient = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = gradient(model, inputs, labels)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)
    return loss, nnx.state((model, optimizer, metrics))


def build_with_graphdef() -> Case:
    """The graph definition, which has no leaves, comes first; the state is returned last."""
    model = Transformer(32, 2, 1, dropout=0.0, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, adam(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, optimizer, metrics))
    return Case(
        train_step_with_graphdef,
        state,
        _batches(lambda x, y: (x, y)),
        arguments=lambda state, batch: (graphdef, state, *batch),
        next_state=lambda state, outputs: outputs[1],
    )


def _batches(pack):
    tokens = [data.tokens(i, length=data.LENGTH + 1) for i in range(data.STEPS)]
    return [pack(jnp.asarray(t[:, :-1]), jnp.asarray(t[:, 1:])) for t in tokens]
