"""Frames of workers to outcomes: outputs and failures by position."""

import asyncio
import threading
from typing import Any

import pytest
from models.returning import BrokenOnArrival
from sessions import session_of
from waits import LIMIT, until

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher._core.values import Failed, Failure, Order
from fast_batcher._devices import Placement
from fast_batcher._parent.sending import BatchSender, FrameWorker
from fast_batcher._parent.worker_handle import WorkerState
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import KIND_NAMES, Frame, Kind
from fast_batcher.errors import InferenceError, TransportError
from fast_batcher.settings import Settings

BATCH_ID = 17


class Framed(FrameWorker):
    """A ready worker whose frames come from the test, and the listener that it reports to."""

    def __init__(self) -> None:
        settings = Settings()
        me: Any = self
        sender = BatchSender(settings, me, {}, "name")
        super().__init__(sender, 3, 0, None, settings, Placement(), None, self, self, "name")
        self.state = WorkerState.READY
        self.reports: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.reports.append((name, *what))

    def take(self, kind: int, content: Any) -> None:
        self._dispatch(Frame(kind, BATCH_ID, 0.5, pickling.dumps(content)))

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("nothing is sent")

    spawn = read_all = disconnect = read_begun = reap = reserve = _refuse
    attach = send = fill = _skip = signal = _refuse  # type: ignore[assignment]
    is_alive = True


def read(kind: int, content: Any, earlier: list[Any] | None = None) -> list[Any]:
    """Return the outcomes of an answer, which may come behind a fragment."""
    worker = Framed()
    if earlier is not None:
        worker.take(Kind.OUTPUTS_FRAGMENT, earlier)
    worker.take(kind, content)
    ((name, worker_id, batch_id, seconds, answer),) = worker.reports
    assert (name, worker_id, batch_id, seconds) == ("answered", 3, BATCH_ID, 0.5)
    outcomes: list[Any] = answer()
    return outcomes


def error_of(outcome: Any) -> Any:
    assert isinstance(outcome, Failure)
    return outcome.error


def test_outputs_and_failures_are_outcomes_by_position() -> None:
    assert read(Kind.OUTPUT_ATOMS, ["a", None]) == ["a", None]
    items = [pickling.dumps("b"), pickling.describe(ValueError("bad")), pickling.dumps(None)]
    first, one, bad, three = read(Kind.OUTPUTS, items, [pickling.dumps("ahead")])
    assert (first, one, three) == ("ahead", "b", None)
    assert isinstance(error_of(bad), ValueError)


@pytest.mark.parametrize("kind", [Kind.READY, Kind.INPUTS, Kind.STARTUP_FAILED])
def test_frame_other_than_answer_breaks_protocol(kind: int) -> None:
    with pytest.raises(TransportError, match=KIND_NAMES[kind]):
        read(kind, ["a"])


@pytest.mark.parametrize("how", Failed)
def test_error_of_a_batch_is_made_for_each_request(how: Failed) -> None:
    worker = Framed()
    worker.take(how, pickling.describe(ValueError("bad")))
    ((name, worker_id, batch_id, seconds, reported, fail),) = worker.reports
    assert (name, worker_id, batch_id, seconds) == ("failed", 3, BATCH_ID, 0.5)
    assert reported is how
    assert isinstance(error_of(fail()), ValueError)
    assert error_of(fail()) is not error_of(fail())


def test_orders_are_kinds_of_frames() -> None:
    names = {kind: name for kind, name in KIND_NAMES.items() if kind in frozenset(Order)}
    assert names == {order: order.name for order in Order}


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)], ids=repr)
def test_output_that_cannot_be_unpickled_fails(error: BaseException) -> None:
    items = [pickling.dumps("a"), pickling.dumps(BrokenOnArrival("parent", error))]
    one, two = read(Kind.OUTPUTS, items)
    assert one == "a"
    assert isinstance(error_of(two), InferenceError)
    assert "cannot be unpickled" in str(error_of(two))
    assert type(error).__name__ in str(error_of(two))


class Waits(InferenceModel[Any, Any]):
    """Computes until the test is over."""

    is_over = threading.Event()

    def infer(self, inputs: list[Any]) -> list[Any]:
        self.is_over.wait(LIMIT)
        return inputs


@pytest.mark.anyio
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_wrong_number_of_outcomes_breaks_the_protocol(count: int) -> None:
    Waits.is_over.clear()
    async with DynBatcher(Waits, workers="threads") as batcher:
        calls = [asyncio.create_task(batcher.process_batched(number)) for number in range(2)]
        session = session_of(batcher)
        await until(lambda: any(True for _ in session.scheduler.workers.all_batches()))
        (batch,) = session.scheduler.workers.all_batches()
        message = f"{count} outcomes came back for 2 requests"
        with pytest.raises(TransportError, match=message):
            session.answered(batch.worker, batch.id, 0.0, lambda: ["a"] * count)
        for call in calls:
            with pytest.raises(TransportError, match=message):
                await call
        Waits.is_over.set()
