"""Frames of workers to outcomes: outputs and failures by position."""

from typing import Any

import pytest
from sample_models import BrokenOnArrival

from fast_batcher._asyncio.futures import Failure
from fast_batcher._asyncio.outcomes import OutcomeReader
from fast_batcher._transport import codec
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import InferenceError, TransportError

WORKER = 3
BATCH_ID = 17


@pytest.fixture
def reader() -> OutcomeReader:
    return OutcomeReader()


def frame(kind: Kind, content: Any) -> Frame:
    return Frame(kind, BATCH_ID, 0.0, codec.dumps(content))


def error_of(outcome: Any) -> Any:
    assert isinstance(outcome, Failure)
    return outcome.to_error()


def test_outputs_are_outcomes(reader: OutcomeReader) -> None:
    assert reader.read(WORKER, frame(Kind.OUTPUT_ATOMS, ["a", None]), 2) == ["a", None]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", [Kind.OUTPUT_ATOMS, Kind.OUTPUTS])
def test_another_number_of_outcomes_breaks_the_protocol(
    reader: OutcomeReader, kind: Kind, count: int
) -> None:
    content: list[Any] = [codec.dumps("a"), codec.dumps("b")]
    with pytest.raises(TransportError, match=f"2 outcomes came back for {count} requests"):
        reader.read(WORKER, frame(kind, content), count)


@pytest.mark.parametrize("kind", [Kind.READY, Kind.INPUTS, Kind.STARTUP_FAILED])
def test_a_frame_that_is_no_answer_breaks_the_protocol(reader: OutcomeReader, kind: Kind) -> None:
    with pytest.raises(TransportError, match=kind.name):
        reader.read(WORKER, frame(kind, ["a"]), 1)


def test_items_are_outputs_and_failures_by_position(reader: OutcomeReader) -> None:
    items = [codec.dumps("a"), codec.describe(ValueError("bad")), codec.dumps(None)]
    one, bad, three = reader.read(WORKER, frame(Kind.OUTPUTS, items), 3)
    assert (one, three) == ("a", None)
    assert isinstance(error_of(bad), ValueError)
    assert error_of(bad) is not error_of(bad)


def test_parts_come_before_the_last_and_are_kept_by_worker(reader: OutcomeReader) -> None:
    reader.keep_part(1, frame(Kind.OUTPUTS_PART, [codec.dumps("one a")]))
    reader.keep_part(2, frame(Kind.OUTPUTS_PART, [codec.dumps("two a")]))
    reader.keep_part(1, frame(Kind.OUTPUTS_PART, [codec.dumps("one b")]))
    last = frame(Kind.OUTPUTS, [codec.dumps("last")])
    assert reader.read(1, last, 3) == ["one a", "one b", "last"]
    assert reader.read(2, last, 2) == ["two a", "last"]
    # Nothing is left for the next batch.
    assert reader.read(1, last, 1) == ["last"]


def test_the_parts_of_a_lost_worker_are_forgotten(reader: OutcomeReader) -> None:
    reader.keep_part(WORKER, frame(Kind.OUTPUTS_PART, [codec.dumps("lost")]))
    reader.remove_worker(WORKER)
    reader.remove_worker(WORKER)
    last = frame(Kind.OUTPUTS, [codec.dumps("new")])
    assert reader.read(WORKER, last, 1) == ["new"]


def test_a_failure_is_that_of_each_request_as_another_error(reader: OutcomeReader) -> None:
    failed = frame(Kind.FAILED, codec.describe(ValueError("bad")))
    outcomes = reader.read(WORKER, failed, 3)
    errors = [error_of(outcome) for outcome in outcomes]
    assert [str(error) for error in errors] == ["bad"] * 3
    assert len({id(error) for error in errors}) == 3


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)], ids=repr)
def test_an_output_that_cannot_be_unpickled_is_an_error(
    reader: OutcomeReader, error: BaseException
) -> None:
    broken = BrokenOnArrival("parent", error)
    items = [codec.dumps("a"), codec.dumps(broken)]
    one, two = reader.read(WORKER, frame(Kind.OUTPUTS, items), 2)
    assert one == "a"
    assert isinstance(error_of(two), InferenceError)
    assert "cannot be unpickled" in str(error_of(two))
    assert type(error).__name__ in str(error_of(two))
