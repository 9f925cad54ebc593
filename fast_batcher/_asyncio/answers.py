"""Frames of the workers to outcomes, and outcomes to callers. API process, the event loop's thread.

A batch is answered by one frame in the usual case. Larger outputs come in several frames, or lie in
the worker's outbox and are copied out: little on the spot, much on the copier thread.
"""

import functools
from typing import Any

from fast_batcher._asyncio.futures import Failure, settle
from fast_batcher._asyncio.pump import Pump
from fast_batcher._asyncio.reports import Reports
from fast_batcher._clock import monotonic
from fast_batcher._core.messages import Batch, Request
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._parent.batch_sender import BatchSender
from fast_batcher._parent.input_arena import MOST_AT_ONCE
from fast_batcher._parent.pool import Pool as MemoryService
from fast_batcher._parent.pool import Pool
from fast_batcher._shared_memory.outbox import Answer, Outbox as OutboxReader
from fast_batcher._transport.codec import RemoteFailure, loads, one_line
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import InferenceError, TransportError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_OUTPUT_ATOMS, _SHARED_OUTPUTS = Kind.OUTPUT_ATOMS, Kind.SHARED_OUTPUTS
# Frames that leave their batch unanswered.
UNFINISHED_KINDS = frozenset({Kind.OUTPUTS_PART, Kind.PONG, Kind.FREED})
# Frames after which some of the batch's requests may be tried again.
RAISED_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})
# Frames that are one failure for every request of their batch.
FAILURE_KINDS = RAISED_KINDS | {Kind.FAILED}


class Answers:
    """Reads what the workers of one session answer, and settles the requests.

    Args:
        scheduler: Knows which batch a frame answers.
        pump: Dispatches the next batch before the present one is settled.
        sender: Told which batches no worker has a view of any more.
        pool: Told about pings and batches that were answered; replaces workers.
        memory: Copies large answers on its thread.
        reports: Makes log lines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pump: Pump,
        sender: BatchSender,
        pool: Pool,
        memory: MemoryService,
        reports: Reports,
    ) -> None:
        self._scheduler = scheduler
        self._pump = pump
        self._sender = sender
        self._pool = pool
        self._memory = memory
        self._reports = reports
        # Where each ready worker leaves large answers; None if it sends them through the pipe.
        self._outboxes: dict[int, OutboxReader | None] = {}
        # Outcomes that came ahead of the last frame of their batch, by worker: each worker answers
        # one batch at a time.
        self._parts: dict[int, list[Any]] = {}

    def add_worker(self, worker: int, outbox: OutboxReader | None) -> None:
        """A worker is ready.

        Args:
            worker: The worker's id.
            outbox: Where it leaves large answers, None if it sends them through the pipe.
        """
        self._outboxes[worker] = outbox

    def remove_worker(self, worker: int) -> None:
        """A worker is lost, and what it had begun to answer with it."""
        del self._outboxes[worker]
        self._parts.pop(worker, None)

    def take(self, worker: int, frame: Frame) -> None:
        """Handle a frame of a ready worker.

        Raises:
            Exception: The frame makes no sense; the pool then replaces the worker.
        """
        if frame.kind in UNFINISHED_KINDS:
            self._take_unfinished(worker, frame)
            return
        has_raised = frame.kind in RAISED_KINDS
        scheduler = self._scheduler
        batch = scheduler.batch_done(monotonic(), worker, frame.batch_id, has_raised)
        if batch is None:
            self._reject_answer(frame)
            return
        scheduler.counters.infer_times.append((frame.seconds, 1))
        if self._pool.recycles:
            self._pool.batch_answered(worker)
        if has_raised:
            self._retry_or_fail(worker, frame, batch)
            return
        # Give the worker its next batch before anything is done about this one.
        if scheduler.queue.size or scheduler.retries or scheduler.fault is not None:
            self._pump.advance(monotonic())
        if frame.kind is _SHARED_OUTPUTS:
            self._collect(worker, frame, batch)
        else:
            self._settle(batch.requests, self._read_or_fail(worker, frame, batch.requests))
        self._pump.notice_drained()

    def _take_unfinished(self, worker: int, frame: Frame) -> None:
        """Handle a frame that is not the end of a batch's answer."""
        if frame.kind is Kind.FREED:
            self._sender.free(worker, frame)
        elif frame.kind is Kind.PONG:
            self._pool.answered_ping(worker)
        elif self._scheduler.find_batch(worker, frame.batch_id) is None:
            self._reject_answer(frame)
        else:
            self._parts.setdefault(worker, []).extend(loads(frame.body))

    def _reject_answer(self, frame: Frame) -> None:
        """A worker has answered a batch that it does not have."""
        if not self._scheduler.is_closed:  # else no caller waits for it any more
            raise TransportError(f"an answer to batch {frame.batch_id}, which it does not have")

    def _retry_or_fail(self, worker: int, frame: Frame, batch: Batch) -> None:
        """`infer` raised: some requests of the batch may be tried again, the others fail."""
        is_fatal = frame.kind is Kind.FATAL
        failed = self._scheduler.batch_raised(
            monotonic(),
            batch,
            out_of_memory=frame.kind is Kind.OUT_OF_MEMORY,
            is_fatal=is_fatal,
        )
        self._settle(failed, self._read_or_fail(worker, frame, failed))
        if is_fatal:
            self._reports.log_fatal_error(worker)
            self._scheduler.worker_retired(worker)
            self._pool.kill(worker)
        self._pump.advance(monotonic())

    # Answers in one frame.

    def _read_or_fail(self, worker: int, frame: Frame, requests: list[Request]) -> list[Any]:
        """The outcomes that a frame holds.

        Raises:
            Exception: They cannot be read. The requests, which are no longer on the worker, have
                failed.
        """
        try:
            return self._read(worker, frame, len(requests))
        except Exception as error:
            self._fail_all(requests, error)
            raise

    def _read(self, worker: int, frame: Frame, count: int) -> list[Any]:
        """The outcomes of a batch by position: outputs, and a `Failure` where there is none.

        Raises:
            TransportError: The frame answers no batch of `count` requests.
        """
        outcomes: list[Any]
        if frame.kind is _OUTPUT_ATOMS:
            outcomes = loads(frame.body)
        elif frame.kind is Kind.OUTPUTS:
            outcomes = _read_items(self._parts.pop(worker, []) + loads(frame.body))
        elif frame.kind in FAILURE_KINDS:
            outcomes = [Failure(RemoteFailure(*loads(frame.body)).to_error)] * count
        else:
            raise TransportError(f"a worker answered with {frame.kind.name}")
        _check_count(outcomes, count)
        return outcomes

    def _settle(self, requests: list[Request], outcomes: list[Any]) -> None:
        settle(self._scheduler.counters, requests, outcomes)

    def _fail_all(self, requests: list[Request], error: Exception) -> None:
        """Fail requests whose answer cannot be read; their worker will be replaced."""
        failure = Failure(functools.partial(TransportError, str(error)))
        self._settle(requests, [failure] * len(requests))

    # Answers in an outbox.

    def _collect(self, worker: int, frame: Frame, batch: Batch) -> None:
        """Copy the outputs of a batch out of its worker's outbox, if a caller waits for them."""
        try:
            start, sizes, frozen, items, failures = loads(frame.body)
            outbox = self._outboxes[worker]
            if outbox is None:
                raise TransportError("a worker without an outbox has left something there")  # noqa: TRY301
            answer = outbox.find(start, sizes, frozen, items)
        except Exception as error:
            self._fail_all(batch.requests, error)
            raise
        if all(request.is_settled for request in batch.requests):
            answer.release()
        elif answer.size <= MOST_AT_ONCE:
            self._settle_copied(batch, answer, failures)
        else:
            self._scheduler.begin_copy_out(batch)
            self._memory.run_in_thread(
                functools.partial(answer.copy, releases_gil=True),
                functools.partial(self._finish_collecting, worker, batch, answer, failures),
            )

    def _finish_collecting(
        self,
        worker: int,
        batch: Batch,
        answer: Answer,
        failures: dict[int, RemoteFailure],
        _: BaseException | None,
    ) -> None:
        """Settle a batch whose outputs have been copied, or could not be: reading says so again."""
        if not self._scheduler.end_copy_out(batch):
            return
        try:
            self._settle_copied(batch, answer, failures)
        except Exception as error:  # noqa: BLE001  no frame is being read that could end with it
            self._pool.kill_on_protocol_error(worker, error)
        self._pump.notice_drained()

    def _settle_copied(
        self, batch: Batch, answer: Answer, failures: dict[int, RemoteFailure]
    ) -> None:
        """Settle a batch with the outputs that an outbox holds, and free their memory."""
        try:
            outcomes = answer.load(_unreadable)
            _check_count(outcomes, len(batch.requests))
            _insert_failures(outcomes, failures)
        except Exception as error:
            self._fail_all(batch.requests, error)
            raise
        self._settle(batch.requests, outcomes)


def _insert_failures(outcomes: list[Any], failures: dict[int, RemoteFailure]) -> None:
    try:
        for position, failure in failures.items():
            outcomes[position] = Failure(RemoteFailure(*failure).to_error)
    except (AttributeError, TypeError, IndexError) as error:
        text = f"failures came back that are not failures: {one_line(error)}"
        raise TransportError(text) from error


def _read_items(items: list[Any]) -> list[Any]:
    """The outcomes that were pickled one by one."""
    outcomes = []
    for item in items:
        try:
            if isinstance(item, bytes):
                outcome = loads(item)
            else:
                outcome = Failure(RemoteFailure(*item).to_error)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code
            outcome = _unreadable(error)
        outcomes.append(outcome)
    return outcomes


def _check_count(outcomes: list[Any], count: int) -> None:
    if len(outcomes) != count:
        raise TransportError(f"{len(outcomes)} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(lambda: InferenceError(text))
