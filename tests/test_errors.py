"""Errors say what, where, why and what to try, and survive a trip to another process."""

import doctest
import pickle

import pytest

from autopar import errors as public
from autopar.base import errors
from autopar.base.errors import AutoparError, MemoryLimitError


def all_errors(kind: type[AutoparError] = AutoparError) -> list[type[AutoparError]]:
    """Those of `autopar.errors`: other modules derive some with arguments of their own."""
    below = [sub for sub in kind.__subclasses__() if sub.__module__ == public.__name__]
    return [kind, *(found for sub in below for found in all_errors(sub))]


def test_docstrings() -> None:
    results = [doctest.testmod(module) for module in (errors, public)]
    assert sum(result.attempted for result in results) > 1
    assert sum(result.failed for result in results) == 0


def test_message_has_labelled_parts_within_88_columns() -> None:
    error = AutoparError("It broke.", where="train.py:3", why="word " * 60, hint="mend it")
    lines = str(error).splitlines()
    assert lines[0] == "It broke."
    assert lines[1] == "  where: train.py:3"
    assert lines[2].startswith("  why:   word word")
    assert lines[3].startswith("         word")
    assert lines[-1] == "  try:   mend it"
    assert max(map(len, lines)) <= 88


def test_message_without_parts_is_one_line() -> None:
    assert str(AutoparError("It broke.")) == "It broke."


def test_a_long_path_is_not_broken() -> None:
    path = "/".join(["directory"] * 20)
    assert path in str(AutoparError("It broke.", where=path))


def test_lists_in_a_message_stay_lists() -> None:
    text = str(AutoparError("It broke.", why="these:\n- one\n- two"))
    assert text.splitlines()[1:] == ["  why:   these:", "         - one", "         - two"]


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_is_documented_and_pickles(kind: type[AutoparError]) -> None:
    assert kind.__doc__
    error = kind("What.", where="here", why="because", hint="do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.where, copy.why, copy.hint) == ("What.", "here", "because", "do")


def test_memory_limit_error_names_the_least_memory_and_the_largest_tensors() -> None:
    error = MemoryLimitError(
        "No plan fits in 1 GiB.",
        least_bytes=3 * 2**30,
        largest_tensors=[("params/embedding", 2**30), ("params/head", 2**29)],
    )
    text = str(error)
    assert "3 GiB per device (3,221,225,472 bytes)" in text
    assert text.index("params/embedding: 1 GiB") < text.index("params/head: 512 MiB")
    assert pickle.loads(pickle.dumps(error)).largest_tensors == error.largest_tensors


def test_usual_handlers_catch_the_errors() -> None:
    with pytest.raises(ValueError, match="What"):
        raise errors.OptionError("What.")
    with pytest.raises(RuntimeError, match="What"):
        raise errors.DonatedBufferError("What.")
