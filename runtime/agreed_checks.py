"""Processes of one run that answer a question alike, asked again and again between steps.

A process that ends its loop one step before the others leaves them waiting in a collective. So
every process counts how often it asked, and an answer holds for one count: each adds its vote to a
number in the key-value store of `jax.distributed`, and the last one writes down what came of it.
That takes no collective, so devices are not waited for.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from autopar.base.errors import DeviceError
from autopar.passes.graph import jax_compat

DEADLINE_SECONDS = 900.0
"""For processes that have not asked as often, because they compile or save."""

_PAUSE_SECONDS = 0.5
"""In one wait for the store; between two of them Python hears signals."""

_YES = 1 << 15
"""What a vote for yes adds beside the one that counts it; the store's numbers have 32 bits."""

_numbers: dict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)
"""Of questions of one name to the same processes: others are not in step with them."""


class AgreedChecks:
    """One question to some processes; the n-th answer is the same in each of them.

    All of them make the objects in the same order, and ask each equally often. The first yes of
    any process is the answer of all, and the last question.
    """

    def __init__(self, client: Any, members: Sequence[int], name: str):
        self._client, self._num_processes, self._name = client, len(members), name
        group = "-".join(map(str, members))
        self._prefix = f"autopar/{name}/{group}/{next(_numbers[name, tuple(members)])}"
        self._num_asked = 0
        self._was_yes = False

    def ask(self, own: bool) -> bool:
        """Whether any process says yes, once all have come to this question.

        Raises:
          DeviceError: others do not come to it.
        """
        if not self._was_yes:
            self._num_asked += 1
            self._was_yes = self._answer(self._num_asked, own)
        return self._was_yes

    def _answer(self, number: int, own: bool) -> bool:
        votes = int(self._client.key_value_increment(f"{self._key(number)}/votes", 1 + own * _YES))
        if votes % _YES == self._num_processes:
            answer = str(votes // _YES)
            self._client.key_value_set(f"{self._key(number)}/answer", answer)
            if number > 1:  # all have read what came before
                self._client.key_value_delete(self._key(number - 1))
        else:
            answer = self._waited_for(number)
        return answer != "0"

    def _waited_for(self, number: int) -> str:
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            pause = max(min(_PAUSE_SECONDS, end - time.monotonic()), 0.001)
            try:
                key = f"{self._key(number)}/answer"
                return str(self._client.blocking_key_value_get(key, int(1000 * pause)))
            except jax.errors.JaxRuntimeError as error:
                if time.monotonic() < end and "DEADLINE_EXCEEDED" in str(error):
                    continue
                raise DeviceError(
                    f"Other processes have not come to check {number} of {self._name}.",
                    why=f"they have not asked within {DEADLINE_SECONDS:.0f} seconds, or are gone "
                    f"({str(error).splitlines()[0]}).",
                    hint="let all processes run the same loop, and ask in each of its steps.",
                ) from None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"


def agreed_checks(name: str, members: Sequence[int] | None = None) -> AgreedChecks | None:
    """A question of this name to processes of `jax.distributed`; None: no other one is asked.

    Args:
      name: of the question.
      members: the processes that are asked; all of them.
    """
    client = jax_compat.distributed_client()
    members = range(jax.process_count()) if members is None else sorted(set(members))
    if client is None or len(members) == 1 or jax.process_index() not in members:
        return None
    return AgreedChecks(client, members, name)
