"""What a loop does around a planned step, whether it was compiled ahead or plans itself."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.base.user_code import shortens

# What is used by few is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    from autopar.batch_targets import CompiledStep
    from autopar.prefetching import Prefetch
    from autopar.step_metrics import LoopWatch, StepMetrics


class AroundStep(abc.ABC):
    """Base of steps: reading batches ahead, and what the calls of a loop take."""

    @functools.cached_property
    def _loop(self) -> LoopWatch:
        from autopar.step_metrics import LoopWatch

        return LoopWatch()

    @abc.abstractmethod
    def _last_compiled(self) -> CompiledStep:
        """What ran last, or was compiled."""

    @abc.abstractmethod
    def _compiled_steps(self) -> Sequence[CompiledStep]:
        """What is compiled by now, for one signature each."""

    @shortens
    def prefetch(
        self,
        source: Any,
        *,
        size: int = 2,
        ragged: str = "follow",
        mask: str | None = None,
        position: Any = None,
    ) -> Prefetch:
        """The batches of a source, placed where the plan wants them, ahead of time on a thread.

        A batch that is placed is not sent during the step. What is read before the step has a plan
        is placed by the step. On Ray actors, each reads
        its own rows of a source with indices (`source[i]` and `len`) that is small as bytes (64
        KiB: file names rather than arrays), but for the first and the last batch; of other sources
        the driver sends every batch with the call, and only reads ahead. Of several processes that
        compute together each gives a source of the same whole batches, and copies what its own
        devices hold.

        Args:
          source: an iterable of what the step takes as its batch (of several arguments: tuples of
            them): a generator, a list or another sequence of batches, a loader of PyTorch, Grain or
            TensorFlow; leaves of NumPy, JAX, PyTorch, TensorFlow. Each is copied.
          size: how many batches are read ahead; each takes its memory on the devices.
          ragged: what becomes of a batch with fewer examples than a full one, such as the last:
            "follow": it goes to the step, which compiles for it once; "drop": it is left out;
            "pad": its last example is repeated, and every batch comes with a mask.
          mask: with "pad", the entry of the batch, a dict, that is bool[examples] and false for
            what was added. None: items are pairs of the batch and this mask.
          position: where to begin: the `position` of an earlier `Prefetch`. It is a number of
            batches, which are skipped (by index where the source has indices), or what the source's
            own iterator says (`get_state` and `set_state`).

        Returns:
          A `Prefetch`: an iterator with `position` and `close()`. What the source raises is raised
          by the loop, with its traceback.

        Raises:
          OptionError: an argument has an impossible value.
          BatchArgumentError: the source is nothing to iterate over.

        >>> import jax, jax.numpy as jnp, numpy as np, autopar
        >>> step = autopar.parallelize(lambda w, x: (w + x.sum(0), x.mean()), method="data")
        >>> w = jnp.zeros(4)
        >>> with step.prefetch([np.ones((8, 4), np.float32)] * 3) as batches:
        ...     for x in batches:
        ...         w, mean = step(w, x)
        >>> batches.position, float(w[0])
        (3, 24.0)
        """
        from autopar.prefetching import prefetch

        asked: Any = {"size": size, "ragged": ragged, "mask": mask, "position": position}
        return prefetch(self._compiled_steps, source, **asked)

    @property
    @shortens
    def metrics(self) -> StepMetrics:
        """Seconds, examples and tokens a second, MFU and memory of the last 100 calls.

        Reading it waits for nothing. Its seconds are those between calls, so a loop that never
        looks at a result runs ahead of the devices, and has to look (`float(loss)`) or to use
        `on_step` for true ones. What planning and compiling took is not counted, nor is a
        call beside one with a batch of another size: after the last, smaller batch of an epoch,
        they are still those of the others.

        Raises:
          AutoparError: the step has no plan yet.

        >>> import jax.numpy as jnp, autopar
        >>> step = autopar.parallelize(lambda w, x: (w + x.sum(0), x.mean()), method="data")
        >>> w = jnp.zeros(4)
        >>> for _ in range(3):
        ...     w, mean = step(w, jnp.ones((8, 4)))
        >>> step.metrics.steps, step.metrics.window, step.metrics.examples_per_second > 0
        (3, 2, True)
        """
        self._last_compiled()
        return self._loop.metrics()

    @shortens
    def on_step(
        self, callback: Callable[[StepMetrics], Any], every: int = 10
    ) -> Callable[[], None]:
        """Call a function with the metrics after every so many calls, once their results are there.

        Only those calls wait for their results. What the function raises becomes a warning, for the
        call must return the new state: the old one is consumed.

        Args:
          callback: such as `lambda m: wandb.log(m.as_dict(), step=m.steps)`.
          every: after how many calls, 1 at least.

        Returns:
          A function that ends it.

        Raises:
          OptionError: an argument is impossible.
        """
        return self._loop.watch(callback, every)

    @shortens
    def load_weights(
        self,
        like: Any,
        source: Any,
        names: Callable[[str], str | tuple[str, Sequence[int]]] | None = None,
    ) -> Any:
        """A tree with weights from files, each leaf where the plan has it.

        Leaf by leaf, each device is given its part of the file, so that no process holds a model
        whole, nor a leaf that its devices share; of .npz files and Orbax's folders one leaf at a
        time is read whole. For Ray actors the driver reads leaf by leaf.

        Args:
          like: the parameters, as (a part of) an argument of the step has them, such as
            `state.params`: arrays, or `jax.ShapeDtypeStruct`s. It may have been consumed.
          source: a .safetensors or .npz file, a folder with .safetensors files, .npy files or what
            Orbax wrote; its path may be one of `gs://` or `s3://` (by `etils.epath` and the file
            system's package). Or a mapping of names to arrays, such as a PyTorch `state_dict()`.
          names: which array a leaf is: a function of the leaf's path ("block_0.dense.kernel") that
            returns the array's name, or its name and the order of its dimensions: `(name, (1, 0))`
            for a matrix that is transposed there. None: the path is the name.

        Returns:
          A tree as `like`. Numbers are converted to its dtypes, floats to floats.

        Raises:
          CheckpointError: the file cannot be read, or lacks an array, or has it in another shape.
          TraceError: the step takes no such leaf.
          AutoparError: the step has no plan yet.

        >>> import jax, jax.numpy as jnp, numpy as np, autopar
        >>> like = {"w": jax.ShapeDtypeStruct((4, 2), np.float32)}
        >>> step = autopar.compile(lambda p, x: ({"w": p["w"] + x.sum()}, x.mean()), like,
        ...                        jax.ShapeDtypeStruct((8, 4), np.float32), method="data")
        >>> weights = {"linear.weight": np.ones((2, 4))}
        >>> step.load_weights(like, weights, lambda path: ("linear.weight", (1, 0)))["w"].shape
        (4, 2)
        """
        from autopar.weight_loading import load_weights

        compiled = self._last_compiled()
        return load_weights(compiled.traced, compiled.place_leaf, like, source, names)
