# mypy: disallow-untyped-defs=False
"""Hugging Face's Flax models at tiny sizes, trained as its Flax examples do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct, traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot
from transformers import (
    BertConfig,
    FlaxBertForMaskedLM,
    FlaxGPT2LMHeadModel,
    FlaxViTForImageClassification,
    GPT2Config,
    ViTConfig,
)

from . import data
from .case import Case
from .optimizers import EPS

HIDDEN = 32
LAYERS = 2
HEADS = 2


class TrainState(train_state.TrainState):
    """The examples' state: it owns the key that dropout draws from."""

    dropout_rng: jax.Array = struct.field()


def decay_mask_fn(params):
    """Weight decay for all but biases and the scales of norms."""
    flat = traverse_util.flatten_dict(params)
    mask = {path: path[-1] not in ("bias", "scale") for path in flat}
    return traverse_util.unflatten_dict(mask)


def _state(model: Any) -> TrainState:
    init = jax.jit(model.init_weights, static_argnums=1)
    schedule = optax.join_schedules(
        [optax.linear_schedule(1e-3, 1e-2, 2), optax.linear_schedule(1e-2, 0.0, 10)], [2]
    )
    optimizer = optax.adamw(schedule, eps=EPS, weight_decay=0.01, mask=decay_mask_fn)
    return TrainState.create(
        apply_fn=model.__call__,
        params=init(jax.random.PRNGKey(0), model.input_shape),
        tx=optimizer,
        dropout_rng=jax.random.PRNGKey(11),
    )


def build_gpt2() -> Case:
    """FlaxGPT2LMHeadModel with a shifted cross entropy."""
    config = GPT2Config(
        vocab_size=data.VOCABULARY,
        n_positions=data.LENGTH,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = FlaxGPT2LMHeadModel(config, dtype=jnp.float32, _do_init=False)

    def loss_fn(logits, labels):
        shift_logits = logits[..., :-1, :]
        shift_labels = labels[..., 1:]
        loss = optax.softmax_cross_entropy(
            shift_logits, onehot(shift_labels, shift_logits.shape[-1])
        )
        return loss.mean()

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss_fn(logits, labels)

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        return new_state, {"loss": loss}

    batches = []
    for i in range(data.STEPS):
        tokens = data.tokens(i)
        mask = (np.arange(data.LENGTH) < data.lengths(i)[:, None]).astype(np.int32)
        batches.append(({"input_ids": tokens, "attention_mask": mask, "labels": tokens},))
    return Case(train_step, _state(model), batches)


def build_bert() -> Case:
    """FlaxBertForMaskedLM; the loss counts masked tokens only."""
    config = BertConfig(
        vocab_size=data.VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=data.LENGTH,
    )
    model = FlaxBertForMaskedLM(config, dtype=jnp.float32, _do_init=False)

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def loss_fn(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            label_mask = jnp.where(labels > 0, 1.0, 0.0)
            loss = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1]))
            loss = (loss * label_mask).sum()
            num_labels = label_mask.sum()
            return loss / num_labels, num_labels

        (loss, num_labels), grad = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        return new_state, {"loss": loss, "num_labels": num_labels}

    batches = []
    for i in range(data.STEPS):
        tokens = data.tokens(i)
        masked = np.random.default_rng([6, i]).random(tokens.shape) < 0.3
        batch = {
            "input_ids": np.where(masked, 3, tokens),
            "attention_mask": np.ones_like(tokens),
            "labels": np.where(masked, tokens, -100),
        }
        batches.append((batch,))
    return Case(train_step, _state(model), batches)


def build_vit() -> Case:
    """FlaxViTForImageClassification."""
    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        image_size=8,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    model = FlaxViTForImageClassification(config, dtype=jnp.float32, _do_init=False)

    def loss_fn(logits, labels):
        return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss_fn(logits, labels)

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        return new_state, {"loss": loss}

    batches = [
        ({"pixel_values": data.images(i).transpose(0, 3, 1, 2), "labels": data.classes(i)},)
        for i in range(data.STEPS)
    ]
    return Case(train_step, _state(model), batches)
