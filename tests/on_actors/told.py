"""What actors are told."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.runtime.ray.actor.messages import Message, packed
from autopar.runtime.ray.driver import running


def noted_messages(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What actors are told from now on."""
    found: list[Message] = []

    def noted(message: Message) -> Any:
        found.append(message)
        return packed(message)

    monkeypatch.setattr(running, "packed", noted)
    return found
