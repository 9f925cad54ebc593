"""Batches to frames and frames to outcomes: which frames are sent, and who gets what from them."""

import time
from typing import Any

import pytest
from models.returning import RefusesPickling

from fast_batcher._core.values import Batch, Release, Request
from fast_batcher._parent.sending import BatchSender
from fast_batcher._process import SLOW
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Kind
from fast_batcher.errors import (
    RemoteTraceback,
    RequestTooLargeError,
    UnsendableValueError,
)
from fast_batcher.settings import Settings

MAX_FRAME_BYTES = 2**20
WORKER = 3
BATCH_ID = 17


class Wire:
    """A `BatchSender`, and the frames of its only worker; there is no shared memory."""

    id = WORKER
    slabs = None

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, bytes]] = []
        settings = Settings(max_frame_bytes=MAX_FRAME_BYTES)
        memory: Any = self
        # The inputs that cannot be sent.
        self.refused: list[Any] = []
        self._sender = BatchSender(settings, memory, {WORKER: memory}, "name")

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("without shared memory nothing is copied, or found out later")

    run_in_thread = reserve = fill = _refuse

    def inputs_unsendable(self, _: Batch, refused: list[Any]) -> None:
        self.refused += refused

    def send_batch(self, batch: Batch) -> list[Any]:
        """Send a batch; return the requests that cannot be sent, with the reasons."""
        worker: Any = self
        worker.listener = self
        self._sender.send(worker, batch, ())
        return self.refused

    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        assert len(body) <= MAX_FRAME_BYTES
        self.sent.append((kind, batch_id, body))

    @property
    def kinds(self) -> list[int]:
        return [kind for kind, _, _ in self.sent]

    def items(self) -> list[Any]:
        """The items that were sent one by one, unpickled."""
        return [pickling.loads(item) for _, _, body in self.sent for item in pickling.loads(body)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def batch_of(*values: Any) -> Batch:
    requests = [Request(value, None, deadline=1.0) for value in values]
    return Batch(BATCH_ID, WORKER, requests, Release.FULL, 1.0, len(requests), 0.0)


# --- sending --------------------------------------------------------------------------------------


def test_a_batch_of_atoms_is_one_pickle(wire: Wire) -> None:
    assert wire.send_batch(batch_of("a", None, 3)) == []
    ((kind, batch_id, body),) = wire.sent
    assert (kind, batch_id) == (Kind.INPUT_ATOMS, BATCH_ID)
    assert pickling.loads(body) == ["a", None, 3]


def test_other_batches_are_one_frame_of_pickles(wire: Wire) -> None:
    shared = {"a": [1]}
    assert wire.send_batch(batch_of(shared, "a", (shared, shared))) == []
    assert wire.kinds == [Kind.INPUTS]
    one, text, (two, also_two) = wire.items()
    assert (one, text, two) == (shared, "a", shared)
    assert one is not two
    assert two is also_two


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), RecursionError()], ids=repr
)
def test_unpicklable_input_fails_alone(wire: Wire, error: BaseException) -> None:
    batch = batch_of("a", RefusesPickling(error), "c")
    ((request, refusal),) = wire.send_batch(batch)
    assert request is batch.requests[1]
    assert isinstance(refusal, UnsendableValueError)
    assert isinstance(refusal.__cause__, RemoteTraceback)
    assert "in __reduce__" in str(refusal.__cause__)
    assert "RefusesPickling" in str(refusal)
    assert wire.kinds == [Kind.INPUTS]
    assert wire.items() == ["a", "c"]


class SlowToPickle:
    """Works while it is pickled, as an image that is read and decoded only then."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(1.5 * SLOW)
        return list, ()


@pytest.mark.slow
def test_slow_pickling_is_logged_once(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert wire.send_batch(batch_of(SlowToPickle())) == []
    (message,) = caplog.messages
    assert message.startswith("name: pickling inputs took ")


def test_unsendable_batch_sends_nothing(wire: Wire) -> None:
    refused = wire.send_batch(batch_of(lambda: None, lambda: None))
    assert [type(refusal) for _, refusal in refused] == [UnsendableValueError] * 2
    assert wire.sent == []


def test_too_large_batch_is_sent_in_parts(wire: Wire) -> None:
    values = [bytes([number]) * 300_000 for number in range(8)]
    assert wire.send_batch(batch_of(*values)) == []
    assert len(wire.kinds) > 2
    assert set(wire.kinds[:-1]) == {Kind.INPUTS_FRAGMENT}
    assert wire.kinds[-1] is Kind.INPUTS
    assert wire.items() == values


def test_too_large_input_fails_alone(wire: Wire) -> None:
    batch = batch_of(b"small", bytes(MAX_FRAME_BYTES), b"other")
    ((request, refusal),) = wire.send_batch(batch)
    assert request is batch.requests[1]
    assert isinstance(refusal, RequestTooLargeError)
    assert f"more than max_frame_bytes={MAX_FRAME_BYTES}" in str(refusal)
    assert wire.items() == [b"small", b"other"]
