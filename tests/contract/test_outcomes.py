"""Frames of workers to outcomes: outputs and failures by position."""

from typing import Any

import pytest
from models.returning import BrokenOnArrival

from fast_batcher._core.values import Failure
from fast_batcher._parent.sending import OutcomeReader, read_outcomes
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import KIND_NAMES, Frame, Kind
from fast_batcher.errors import InferenceError, TransportError


def read(kind: int, content: Any, count: int, earlier: list[Any] | None = None) -> list[Any]:
    return read_outcomes(
        Frame(kind, 17, 0.0, pickling.dumps(content)), earlier, count, OutcomeReader()
    )


def error_of(outcome: Any) -> Any:
    assert isinstance(outcome, Failure)
    return outcome.error


def test_outputs_and_failures_are_outcomes_by_position() -> None:
    assert read(Kind.OUTPUT_ATOMS, ["a", None], 2) == ["a", None]
    items = [pickling.dumps("b"), pickling.describe(ValueError("bad")), pickling.dumps(None)]
    first, one, bad, three = read(Kind.OUTPUTS, items, 4, [pickling.dumps("ahead")])
    assert (first, one, three) == ("ahead", "b", None)
    assert isinstance(error_of(bad), ValueError)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", [Kind.OUTPUT_ATOMS, Kind.OUTPUTS])
def test_wrong_number_of_outcomes_breaks_the_protocol(kind: int, count: int) -> None:
    with pytest.raises(TransportError, match=f"2 outcomes came back for {count} requests"):
        read(kind, [pickling.dumps("a"), pickling.dumps("b")], count)


@pytest.mark.parametrize("kind", [Kind.READY, Kind.INPUTS, Kind.STARTUP_FAILED])
def test_frame_other_than_answer_breaks_protocol(kind: int) -> None:
    with pytest.raises(TransportError, match=KIND_NAMES[kind]):
        read(kind, ["a"], 1)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)], ids=repr)
def test_output_that_cannot_be_unpickled_fails(error: BaseException) -> None:
    items = [pickling.dumps("a"), pickling.dumps(BrokenOnArrival("parent", error))]
    one, two = read(Kind.OUTPUTS, items, 2)
    assert one == "a"
    assert isinstance(error_of(two), InferenceError)
    assert "cannot be unpickled" in str(error_of(two))
    assert type(error).__name__ in str(error_of(two))
