"""Batches to frames: which frames are sent, and which inputs cannot be."""

from typing import Any

import pytest
from sample_models import RefusesPickling

from fast_batcher._core.messages import Batch, Release, Request
from fast_batcher._parent.batch_sender import BatchSender
from fast_batcher._parent.shared_inputs import SharedInputSender
from fast_batcher._transport import codec
from fast_batcher._transport.frames import Kind
from fast_batcher.errors import (
    RequestTooLargeError,
    UnsendableValueError,
)

MAX_FRAME_BYTES = 1000
THRESHOLD = 100
WORKER = 3
BATCH_ID = 17


def refuse(*_: object) -> None:
    raise AssertionError("no worker shares memory: nothing is done aside, or known late")


class Wire:
    """A sender, and what it has sent to its only worker."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, int, bytes]] = []
        shared_inputs = SharedInputSender(
            lambda: None, {}, refuse, "name", THRESHOLD, MAX_FRAME_BYTES, 32
        )
        self.sender = BatchSender(
            {WORKER: self._send},
            MAX_FRAME_BYTES,
            THRESHOLD,
            shared_inputs,
            refuse,
            {},
        )

    def _send(self, kind: Kind, batch_id: int, body: bytes) -> None:
        assert len(body) <= MAX_FRAME_BYTES
        self.sent.append((kind, batch_id, body))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _, _ in self.sent]

    def items(self) -> list[Any]:
        """The items that were sent apart, unpickled."""
        return [codec.loads(item) for _, _, body in self.sent for item in codec.loads(body)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def batch_of(*values: Any) -> Batch:
    requests = [Request(value, None, deadline=1.0) for value in values]
    for number, request in enumerate(requests):
        request.id = number
        request.arrival = 0.0
    return Batch(BATCH_ID, WORKER, requests, Release.FULL, 0.0, 1.0)


# --- sending --------------------------------------------------------------------------------------


def test_a_batch_that_nobody_can_change_is_one_pickle(wire: Wire) -> None:
    assert wire.sender.send(batch_of("a", None, 3)) == []
    ((kind, batch_id, body),) = wire.sent
    assert (kind, batch_id) == (Kind.INPUT_ATOMS, BATCH_ID)
    assert codec.loads(body) == ["a", None, 3]


def test_a_batch_of_anything_else_is_one_frame_with_a_pickle_for_each(wire: Wire) -> None:
    shared = {"a": [1]}
    assert wire.sender.send(batch_of(shared, "a", (shared, shared))) == []
    assert wire.kinds == [Kind.INPUTS]
    one, text, (two, also_two) = wire.items()
    assert (one, text, two) == (shared, "a", shared)
    assert one is not two
    assert two is also_two


class Text(str):
    """One that can be changed."""

    __slots__ = ("note",)


def test_a_class_derived_from_one_that_nobody_can_change_is_pickled_apart(wire: Wire) -> None:
    wire.sender.send(batch_of(Text("a"), Text("b")))
    assert wire.kinds == [Kind.INPUTS]


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), RecursionError()], ids=repr
)
def test_an_input_that_cannot_be_pickled_is_refused_and_the_others_are_sent(
    wire: Wire, error: BaseException
) -> None:
    batch = batch_of("a", RefusesPickling(error), "c")
    ((request, refusal),) = wire.sender.send(batch)
    assert request is batch.requests[1]
    assert isinstance(refusal, UnsendableValueError)
    assert refusal.__cause__ is error
    assert "RefusesPickling" in str(refusal)
    assert wire.kinds == [Kind.INPUTS]
    assert wire.items() == ["a", "c"]


def test_nothing_is_sent_when_nothing_can_be(wire: Wire) -> None:
    refused = wire.sender.send(batch_of(lambda: None, lambda: None))
    assert [type(refusal) for _, refusal in refused] == [UnsendableValueError] * 2
    assert wire.sent == []


def test_a_batch_that_is_too_large_is_sent_in_parts(wire: Wire) -> None:
    values = [bytes([number]) * 300 for number in range(8)]
    assert wire.sender.send(batch_of(*values)) == []
    assert len(wire.kinds) > 2
    assert set(wire.kinds[:-1]) == {Kind.INPUTS_PART}
    assert wire.kinds[-1] is Kind.INPUTS
    assert wire.items() == values


def test_an_input_that_is_too_large_is_refused_and_the_others_are_sent(wire: Wire) -> None:
    batch = batch_of(b"small", bytes(2000), b"other")
    ((request, refusal),) = wire.sender.send(batch)
    assert request is batch.requests[1]
    assert isinstance(refusal, RequestTooLargeError)
    assert "more than max_frame_bytes=1000" in str(refusal)
    assert wire.items() == [b"small", b"other"]
