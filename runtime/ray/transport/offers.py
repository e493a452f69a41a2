"""Arrays from a device of one process to one of another, by `jax.experimental.transfer`.

The sender *offers* arrays once they are computed, and says so by a message of the sockets; only
then does the receiver pull them. So no pull waits for what never comes: a stage that fails offers
nothing, and whoever waits for its message has a deadline and can be called off. What remains is a
peer that ends or hangs while it is pulled from (jaxlib 0.10.2). If it ends, the pull fails. If it
hangs, nothing calls the pull off (its `timeout` did nothing on CPUs): the wait ends at its
deadline, and what was pulled stays until this process ends.

Whoever reaches a process's port and knows an offer's number may pull it; the number is random.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.errors import DeviceError
from autopar.passes.graph.logical import no_mesh

_OFFER = struct.Struct("<Q64s")
OFFER_BYTES = _OFFER.size


class Transfers:
    """What one process offers, and what it pulls; it listens on any port of `host`.

    Raises:
      DeviceError: JAX has no transfers here.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._server = self._started()
        self._connections: dict[str, Any] = {}

    def _started(self) -> Any:
        address = f"{self._host}:0"
        try:
            from jax.experimental import transfer  # not all of JAX's releases have it

            return transfer.start_transfer_server(jax.local_devices()[0].client, address, [address])
        except Exception as error:
            raise DeviceError(
                'Ray(transport="transfer") is not possible here.',
                why=f"jax.experimental.transfer says: {type(error).__name__}: {error}",
                hint='use Ray(transport="sockets").',
            ) from error

    def offer(self, arrays: Sequence[jax.Array]) -> np.ndarray:
        """Let another process pull arrays; what it must know, as bytes."""
        number = secrets.randbits(62)
        self._server.await_pull(number, list(arrays))
        return np.frombuffer(_OFFER.pack(number, self._server.address().encode()), np.uint8)

    def pull(self, offer: np.ndarray, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Begin to pull what was offered, with shardings of one local device each."""
        number, name = _OFFER.unpack(offer.tobytes())
        address = name.rstrip(b"\0").decode()
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        pulled: list[jax.Array] = self._connections[address].pull(number, list(shapes))
        return pulled

    def renew(self) -> None:
        """Forget what was offered and not pulled."""
        self._connections.clear()
        self._server = self._started()


def copy(part: jax.Array) -> jax.Array:
    """A copy on the same device, which stays when the original's memory is taken over."""
    with no_mesh():
        copied: jax.Array = _copy(part)
    return copied


_copy = jax.jit(lambda part: jnp.array(part, copy=True))
