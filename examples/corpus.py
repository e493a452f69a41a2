"""A text that every machine has, Python's own source code, and a bigram model of it."""

import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 256
"""A token is a byte."""

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, int32 [batch, context]: targets are the bytes that follow the inputs."""


def read_corpus() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's source code as bytes: for training, and for validation.

    Every 20th file, in the order of their names, is for validation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in root.rglob("*.py") if not skipped & {*path.relative_to(root).parts}]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    training = [path for number, path in enumerate(files) if number % 20 != 10]
    return _read(training), _read(files[10::20])


def _read(paths: list[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    """A batch of the windows of a text that begin at `starts`."""
    rows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


class TrainingBatches:
    """Endless random windows. A batch depends on the seed and on its position alone."""

    def __init__(self, text: np.ndarray, context: int, batch: int, seed: int, position: int = 0):
        self.text, self.context, self.batch, self.seed = text, context, batch, seed
        self.position = position

    def __next__(self) -> Batch:
        generator = np.random.default_rng([self.seed, self.position])
        self.position += 1
        starts = generator.integers(0, len(self.text) - self.context, self.batch)
        return windows(self.text, starts, self.context)


def validation_batches(text: np.ndarray, context: int, batch: int, count: int) -> list[Batch]:
    """`count` batches of windows spread evenly over the text, always the same."""
    starts = np.linspace(0, len(text) - context - 1, count * batch).astype(np.int64)
    return [windows(text, rows, context) for rows in starts.reshape(count, batch)]


def bigram_bits(training: np.ndarray, batches: list[Batch]) -> float:
    """Bits per byte of a bigram model of the training text on the targets of `batches`.

    p(b | a) = (count(a, b) + q(b)) / (count(a) + 1), where q are the frequencies of single bytes,
    themselves with one added to each count.
    """
    pairs = training[:-1].astype(np.int64) * VOCABULARY + training[1:]
    counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    single = np.bincount(training, minlength=VOCABULARY) + 1
    probability = (counts + single / single.sum()) / (counts.sum(1, keepdims=True) + 1)
    seen = [probability[batch["inputs"], batch["targets"]] for batch in batches]
    return float(-np.mean(np.log2(seen)))
