"""Trains a byte-level GPT on the source code of Python's standard library, on eight devices.

    python examples/train_gpt.py                                    about two minutes
    python examples/train_gpt.py --resume                           goes on after Ctrl-C
    python examples/train_gpt.py --method zero3 --microbatches 2    the same, stored otherwise
    python examples/train_gpt.py --stages 2 --microbatches 4        a pipeline of two stages
    python examples/train_gpt.py --help

The model, the optimizer and `train_step` are what anyone would write for one device. The decorator
`@autopar.parallelize` is all that knows of several.
"""

import contextlib
import math
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pictures
import typer
from corpus import VOCABULARY, Batch, TrainingBatches, bigram_bits, read_corpus, validation_batches
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import autopar
from autopar import report


class Block(nn.Module):
    """Causal self-attention, then a perceptron; each reads normalised inputs and adds to them."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        rows, length, width = x.shape
        drop = nn.Dropout(self.dropout, deterministic=not train)

        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm()(x))
        query, key, value = jnp.split(qkv.reshape(rows, length, 3 * self.heads, -1), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(rows, length, width)
        x = x + drop(nn.Dense(width, name="attention_out")(mixed))

        hidden = nn.gelu(nn.Dense(4 * width, name="mlp_in")(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(width, name="mlp_out")(hidden))


class GPT(nn.Module):
    """Bytes [batch, length] to logits of the byte that follows each, [batch, length, 256]."""

    layers: int
    width: int
    heads: int
    context: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        initializer = nn.initializers.normal(0.02)
        embedding = nn.Embed(VOCABULARY, self.width, embedding_init=initializer, name="bytes")
        positions = self.param("positions", initializer, (self.context, self.width))
        x = embedding(tokens) + positions[: tokens.shape[1]]
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for index in range(self.layers):
            x = Block(self.heads, self.dropout, name=f"block_{index}")(x, train=train)
        return embedding.attend(nn.LayerNorm()(x))


class State(flax.struct.PyTreeNode):
    """Everything that training carries from one step to the next."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    key: jax.Array


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipped gradients; its rate rises for a tenth of the steps, then falls."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, steps // 10),
        decay_steps=max(2, steps),
        end_value=learning_rate / 10,
    )

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def initial_state(model: GPT, optimizer: optax.GradientTransformation, seed: int) -> State:
    @jax.jit
    def init(key: jax.Array) -> State:
        params_key, key = jax.random.split(key)
        params = model.init(params_key, jnp.zeros((1, model.context), jnp.int32))["params"]
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)

    return init(jax.random.key(seed))


def mean_loss(logits: jax.Array, targets: jax.typing.ArrayLike) -> jax.Array:
    """Cross-entropy in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_steps(
    model: GPT, optimizer: optax.GradientTransformation, method: str, **options: Any
) -> tuple[Any, Any]:
    """A parallelized train step with these options, and an evaluation of parameters."""

    @autopar.parallelize(method=method, **options)
    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        dropout_key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> jax.Array:
            rngs = {"dropout": dropout_key}
            logits = model.apply({"params": params}, batch["inputs"], train=True, rngs=rngs)
            return mean_loss(logits, batch["targets"])

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, {"loss": loss}

    def evaluate(params: Any, batch: Batch) -> jax.Array:
        return mean_loss(model.apply({"params": params}, batch["inputs"]), batch["targets"])

    return train_step, evaluate


def generate(model: GPT, params: Any, prompt: bytes, length: int, temperature: float) -> bytes:
    """Samples the `length` bytes that follow a prompt of `context` bytes, one at a time."""

    @jax.jit
    def sample(params: Any, window: jax.Array, keys: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = model.apply({"params": params}, window[None])[0, -1]
            byte = jax.random.categorical(key, logits / temperature)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, window, keys)[1]

    keys = jax.random.split(jax.random.key(0), length)
    window = jnp.array(list(prompt), jnp.int32)
    return bytes(np.asarray(sample(jax.device_get(params), window, keys), np.uint8))


def saved_progress(checkpoints: autopar.Checkpoints, settings: dict[str, Any]) -> dict[str, Any]:
    """How far a run with these settings had come when it saved last."""
    if checkpoints.latest is None:
        raise typer.BadParameter(f"there is no checkpoint in {checkpoints.directory}.")
    progress: dict[str, Any] = checkpoints.extra()
    for name, value in settings.items():
        if progress["settings"][name] != value:
            was = progress["settings"][name]
            raise typer.BadParameter(f"the checkpoint was made with {name}={was}, not {value}.")
    return progress


def readable(text: bytes) -> str:
    """Text without what a terminal would take for commands."""
    decoded = text.decode(errors="replace")
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )


def training_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bits]:.3f} bits per byte, {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


MODEL, TRAINING, PARALLEL, OUTPUT = "Model", "Training", "Parallelization", "Output"


def option(help: str, panel: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


def main(
    layers: Annotated[int, option("Transformer blocks.", MODEL, min=1)] = 2,
    width: Annotated[int, option("Numbers per position.", MODEL, min=1)] = 128,
    heads: Annotated[int, option("Attention heads; divides the width.", MODEL, min=1)] = 4,
    context: Annotated[int, option("Bytes that the model sees.", MODEL, min=1)] = 64,
    dropout: Annotated[float, option("Share of activations dropped.", MODEL, min=0, max=0.9)] = 0.1,
    batch: Annotated[int, option("Windows per step.", TRAINING, min=1)] = 16,
    steps: Annotated[
        int, option("Steps; the learning rate ends with them.", TRAINING, min=1)
    ] = 1000,
    lr: Annotated[float, option("Highest learning rate.", TRAINING, min=0)] = 4e-3,
    seed: Annotated[int, option("Of parameters, dropout and batches.", TRAINING, min=0)] = 0,
    stop_at: Annotated[
        int | None, option("Stop early after this step, to resume later.", TRAINING, min=1)
    ] = None,
    eval_every: Annotated[int, option("Steps between validations.", TRAINING, min=1)] = 250,
    eval_batches: Annotated[int, option("Batches of a validation.", TRAINING, min=1)] = 64,
    method: Annotated[
        Literal["auto", "data", "zero1", "zero2", "zero3", "hsdp", "shard"],
        option("How tensors may be divided among devices; auto: any way.", PARALLEL),
    ] = "auto",
    microbatches: Annotated[
        str, option("Parts into which a batch is split in time: a number, or auto.", PARALLEL)
    ] = "auto",
    stages: Annotated[
        int, option("Pipeline stages, each on its share of the devices.", PARALLEL, min=1)
    ] = 1,
    schedule: Annotated[
        Literal["auto", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2"],
        option("Order of the stages' work; auto: the fastest that fits.", PARALLEL),
    ] = "auto",
    devices: Annotated[
        int, option("Virtual CPU devices; 0 uses the accelerators that JAX sees.", PARALLEL, min=0)
    ] = 8,
    out: Annotated[
        Path, option("Folder for results; an earlier run's are replaced.", OUTPUT)
    ] = Path("runs/gpt"),
    resume: Annotated[
        bool, option("Continue the run in the folder from its last checkpoint.", OUTPUT, "--resume")
    ] = False,
    save_every: Annotated[int, option("Steps between checkpoints.", OUTPUT, min=1)] = 250,
    keep: Annotated[int, option("Checkpoints that are kept.", OUTPUT, min=1)] = 3,
    plots: Annotated[bool, option("Save the loss curve and the plan as pictures.", OUTPUT)] = True,
    sample_bytes: Annotated[int, option("Length of the sample; 0 for none.", OUTPUT, min=0)] = 400,
    temperature: Annotated[float, option("Of the sample.", OUTPUT, min=0.01)] = 0.8,
) -> None:
    """Train a byte-level GPT on the source code of Python's standard library.

    Ctrl-C stops after a checkpoint; --resume continues bit for bit.
    """
    began = time.perf_counter()
    if width % heads:
        raise typer.BadParameter(f"--width {width} is not a multiple of --heads {heads}.")
    if devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    console = Console(width=None if sys.stdout.isatty() else 110)

    training, validation = read_corpus()
    held_out = validation_batches(validation, context, batch, eval_batches)
    bigram = bigram_bits(training, held_out)
    console.print(
        f"text: {len(training):,} bytes of Python's own source code to train on, "
        f"{len(validation):,} of other files to validate\n"
        f"bigram model of the same text: {bigram:.3f} bits per byte"
    )

    model = GPT(layers, width, heads, context, dropout)
    optimizer = make_optimizer(lr, steps)
    settings = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "context": context,
        "dropout": dropout,
        "batch": batch,
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "text": zlib.crc32(training.data),
    }
    progress: dict[str, Any] = {"settings": settings, "position": 0, "losses": [], "validation": []}

    checkpoints = autopar.Checkpoints(out / "checkpoints", keep)
    if resume:
        progress = saved_progress(checkpoints, settings)

    parts = int(microbatches) if microbatches.isdecimal() else microbatches
    train_step, evaluate = make_steps(
        model, optimizer, method, microbatches=parts, stages=stages, schedule=schedule
    )
    console.print("planning and compiling ...")
    started = time.perf_counter()

    def init() -> State:
        return initial_state(model, optimizer, seed)

    tokens = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    shapes = {"inputs": tokens, "targets": tokens}
    train_step = autopar.compile(train_step, jax.eval_shape(init), shapes)
    eval_step = autopar.follow(train_step, evaluate)  # the parameters stay where training has them
    state = train_step.initialize(init)
    preparing = time.perf_counter() - started

    if resume:
        state = checkpoints.restore(state).state
        console.print(f"continuing after step {int(state.step)}")

    batches = TrainingBatches(training, context, batch, seed, progress["position"])

    def validate(params: Any) -> float:
        return float(np.mean([eval_step(params, rows) for rows in held_out])) / math.log(2)

    first = step = int(state.step)
    last = min(steps, stop_at or steps)
    if step >= last:
        raise typer.BadParameter(f"the run in {out} has already done step {step}.")
    speed = busy = 0.0
    bits = validate(state.params)
    console.print(f"step {step:5}: {bits:.3f} bits per byte on the validation text")
    bar = training_bar(console)
    with autopar.interruptible() as interrupted, contextlib.ExitStack() as shown:
        while step < last and not interrupted:
            started = time.perf_counter()
            state, metrics = train_step(state, next(batches))
            loss = float(metrics["loss"])
            step += 1
            if step == first + 1:
                seconds = preparing + time.perf_counter() - started
                if not resume:
                    shutil.rmtree(checkpoints.directory, ignore_errors=True)
                report.print_plan(train_step.plan, console)
                console.print(f"planned, compiled and ran the first step in {seconds:.1f} s")
                shown.enter_context(bar)
                task = bar.add_task("training", total=last, bits=math.nan, speed=speed)
            else:
                busy += time.perf_counter() - started
                speed = (step - first - 1) * batch * context / busy

            progress["position"] = batches.position
            progress["losses"].append(loss)
            bar.update(task, completed=step, bits=loss / math.log(2), speed=speed)
            if step % eval_every == 0 or step == steps:
                bits = validate(state.params)
                progress["validation"].append((step, bits))
                console.print(f"step {step:5}: {bits:.3f} bits per byte on the validation text")
            if step % save_every == 0 or step == last or interrupted:
                checkpoints.save(step, state, extra=progress)
    checkpoints.close()
    if step < steps:
        console.print(f"stopped after step {step}; --resume continues")
        return

    bits = progress["validation"][-1][1]
    if sample_bytes:
        prompt = bytes(held_out[0]["inputs"][0].astype(np.uint8))
        sampled = generate(model, state.params, prompt, sample_bytes, temperature)
        written = Text(readable(prompt), style="dim").append(readable(sampled), style="not dim")
        console.print(Panel(written, title="a validation file, and how the model continues it"))
    if plots:
        pictures.draw_losses(out / "loss.png", progress["losses"], progress["validation"], bigram)
        report.save_plot(train_step.plan, out / "plan.png")
    train_step.plan.save(out / "plan.json")
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    verdict = "beats" if bits < bigram else "[red]does not beat[/]"
    console.print(
        f"[bold]The GPT ({parameters:,} parameters) {verdict} the bigram model: "
        f"{bits:.3f} against {bigram:.3f} bits per byte[/]\n"
        f"on the same {len(held_out) * batch * context:,} bytes of files that neither has seen.\n"
        f"{speed:,.0f} tokens/s, {time.perf_counter() - began:.0f} s in all; results in {out}"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except autopar.AutoparError as error:
        sys.exit(str(error))
