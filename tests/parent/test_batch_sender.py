"""Batches to frames and frames to outcomes: which frames are sent, and who gets what from them."""

from typing import Any

import pytest
from sample_models import BrokenOnArrival, RefusesPickling

from fast_batcher._core.messages import Batch, Release, Request
from fast_batcher._parent.batch_sender import BatchSender, Failure
from fast_batcher._transport import codec
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import (
    InferenceError,
    RequestTooLargeError,
    TransportError,
    UnsendableValueError,
)
from fast_batcher.settings import Settings

MAX_FRAME_BYTES = 2**20
WORKER = 3
BATCH_ID = 17


class Wire:
    """A `BatchSender`, and the frames of its only worker; there is no shared memory."""

    id = WORKER
    slabs = outbox = None

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, int, bytes]] = []
        settings = Settings(max_frame_bytes=MAX_FRAME_BYTES)
        self.sender = BatchSender(settings, self, self._refuse, "name")
        self.sender.add_worker(self)

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("without shared memory nothing is copied, or found out later")

    run_in_thread = reserve = fill = _refuse

    def send(self, kind: Kind, batch_id: int, body: bytes) -> None:
        assert len(body) <= MAX_FRAME_BYTES
        self.sent.append((kind, batch_id, body))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _, _ in self.sent]

    def items(self) -> list[Any]:
        """The items that were sent one by one, unpickled."""
        return [codec.loads(item) for _, _, body in self.sent for item in codec.loads(body)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def batch_of(*values: Any) -> Batch:
    requests = [Request(value, None, deadline=1.0) for value in values]
    return Batch(BATCH_ID, WORKER, requests, Release.FULL, 0.0, 1.0)


def frame(kind: Kind, content: Any) -> Frame:
    return Frame(kind, BATCH_ID, 0.0, codec.dumps(content))


def error_of(outcome: Any) -> Any:
    assert isinstance(outcome, Failure)
    return outcome.to_error()


# --- sending --------------------------------------------------------------------------------------


def test_a_batch_of_atoms_is_one_pickle(wire: Wire) -> None:
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
    """It can be changed."""

    __slots__ = ("note",)


def test_a_value_of_a_class_derived_from_an_atom_is_pickled_by_itself(wire: Wire) -> None:
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
    values = [bytes([number]) * 300_000 for number in range(8)]
    assert wire.sender.send(batch_of(*values)) == []
    assert len(wire.kinds) > 2
    assert set(wire.kinds[:-1]) == {Kind.INPUTS_PART}
    assert wire.kinds[-1] is Kind.INPUTS
    assert wire.items() == values


def test_an_input_that_is_too_large_is_refused_and_the_others_are_sent(wire: Wire) -> None:
    batch = batch_of(b"small", bytes(MAX_FRAME_BYTES), b"other")
    ((request, refusal),) = wire.sender.send(batch)
    assert request is batch.requests[1]
    assert isinstance(refusal, RequestTooLargeError)
    assert f"more than max_frame_bytes={MAX_FRAME_BYTES}" in str(refusal)
    assert wire.items() == [b"small", b"other"]


def test_a_worker_that_is_lost_gets_nothing_more(wire: Wire) -> None:
    wire.sender.remove_worker(WORKER, None)
    with pytest.raises(KeyError):
        wire.sender.send(batch_of("a"))
    wire.sender.add_worker(wire)
    assert wire.sender.send(batch_of("a")) == []
    assert wire.kinds == [Kind.INPUT_ATOMS]


# --- reading --------------------------------------------------------------------------------------


def test_outputs_are_outcomes(wire: Wire) -> None:
    assert wire.sender.read(WORKER, frame(Kind.OUTPUT_ATOMS, ["a", None]), 2) == ["a", None]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", [Kind.OUTPUT_ATOMS, Kind.OUTPUTS])
def test_another_number_of_outcomes_is_nonsense(wire: Wire, kind: Kind, count: int) -> None:
    content: list[Any] = [codec.dumps("a"), codec.dumps("b")]
    with pytest.raises(TransportError, match=f"2 outcomes came back for {count} requests"):
        wire.sender.read(WORKER, frame(kind, content), count)


@pytest.mark.parametrize("kind", [Kind.READY, Kind.INPUTS, Kind.STARTUP_FAILED])
def test_a_frame_that_is_no_answer_is_nonsense(wire: Wire, kind: Kind) -> None:
    with pytest.raises(TransportError, match=kind.name):
        wire.sender.read(WORKER, frame(kind, ["a"]), 1)


def test_items_are_outputs_and_failures_by_position(wire: Wire) -> None:
    items = [codec.dumps("a"), codec.describe(ValueError("bad")), codec.dumps(None)]
    one, bad, three = wire.sender.read(WORKER, frame(Kind.OUTPUTS, items), 3)
    assert (one, three) == ("a", None)
    assert isinstance(error_of(bad), ValueError)
    assert error_of(bad) is not error_of(bad)


def test_parts_come_before_the_last_and_are_kept_by_worker(wire: Wire) -> None:
    sender = wire.sender
    sender.keep_part(1, frame(Kind.OUTPUTS_PART, [codec.dumps("one a")]))
    sender.keep_part(2, frame(Kind.OUTPUTS_PART, [codec.dumps("two a")]))
    sender.keep_part(1, frame(Kind.OUTPUTS_PART, [codec.dumps("one b")]))
    last = frame(Kind.OUTPUTS, [codec.dumps("last")])
    assert sender.read(1, last, 3) == ["one a", "one b", "last"]
    assert sender.read(2, last, 2) == ["two a", "last"]
    # Nothing is left for the next batch.
    assert sender.read(1, last, 1) == ["last"]


def test_the_parts_of_a_lost_worker_are_forgotten(wire: Wire) -> None:
    wire.sender.keep_part(WORKER, frame(Kind.OUTPUTS_PART, [codec.dumps("lost")]))
    wire.sender.remove_worker(WORKER, None)
    wire.sender.remove_worker(WORKER, None)
    last = frame(Kind.OUTPUTS, [codec.dumps("new")])
    assert wire.sender.read(WORKER, last, 1) == ["new"]


def test_a_failure_is_everybodys_and_each_gets_an_error_of_its_own(wire: Wire) -> None:
    failed = frame(Kind.FAILED, codec.describe(ValueError("bad")))
    outcomes = wire.sender.read(WORKER, failed, 3)
    errors = [error_of(outcome) for outcome in outcomes]
    assert [str(error) for error in errors] == ["bad"] * 3
    assert len({id(error) for error in errors}) == 3


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)], ids=repr)
def test_an_output_that_cannot_be_unpickled_is_an_error(wire: Wire, error: BaseException) -> None:
    broken = BrokenOnArrival("parent", error)
    items = [codec.dumps("a"), codec.dumps(broken)]
    one, two = wire.sender.read(WORKER, frame(Kind.OUTPUTS, items), 2)
    assert one == "a"
    assert isinstance(error_of(two), InferenceError)
    assert "cannot be unpickled" in str(error_of(two))
    assert type(error).__name__ in str(error_of(two))
