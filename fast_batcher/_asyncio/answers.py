"""What workers say, from the frame to the callers. API process, the event loop's thread.

A worker that has answered gets its next batch first; then the callers of the answered one get their
outcomes. Little is copied out of a worker's outbox on the spot, much on the copier thread.
"""

import functools
from typing import Any

from fast_batcher._asyncio.futures import Failure, settle
from fast_batcher._asyncio.outcomes import SharedOutcomes, read_outcomes, read_shared_outcomes
from fast_batcher._asyncio.pump import Pump
from fast_batcher._asyncio.reports import Reports
from fast_batcher._clock import monotonic
from fast_batcher._core.messages import Batch, Request
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._parent.batch_sender import BatchSender
from fast_batcher._parent.input_arena import MOST_AT_ONCE
from fast_batcher._parent.memory_service import MemoryService
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.worker import WorkerLink
from fast_batcher._transport.codec import loads
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import TransportError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_SHARED_OUTPUTS = Kind.SHARED_OUTPUTS
# Frames that leave their batch unanswered.
UNFINISHED_KINDS = frozenset({Kind.OUTPUTS_PART, Kind.PONG, Kind.FREED})
# Frames after which some of the batch's requests may be tried again.
RAISED_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})


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
        # The ready workers by id.
        self._links: dict[int, WorkerLink] = {}
        # Outcomes that came ahead of the last frame of their batch, by worker: each worker answers
        # one batch at a time.
        self._parts: dict[int, list[Any]] = {}

    def add_worker(self, link: WorkerLink) -> None:
        """A worker is ready."""
        self._links[link.id] = link

    def remove_worker(self, worker: int) -> None:
        """A worker is lost, and what it had begun to answer with it."""
        self._links.pop(worker, None)
        self._parts.pop(worker, None)

    def take(self, worker: int, frame: Frame) -> None:
        """Handle a frame of a ready worker.

        Raises:
            Exception: The frame makes no sense; the pool then replaces the worker. The requests
                that it answers have failed.
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
        requests = self._after_failure(frame, batch) if has_raised else batch.requests
        # Give the worker its next batch before anything is done about this one.
        if has_raised or scheduler.is_poll_due:
            self._pump.advance(monotonic())
        try:
            if frame.kind is _SHARED_OUTPUTS:
                self._collect(frame, batch)
            else:
                parts = self._parts.pop(worker, None)
                settle(scheduler.counters, requests, read_outcomes(frame, parts, len(requests)))
        except Exception as error:
            self._fail(requests, error)
            raise
        self._pump.notice_drained()

    def _take_unfinished(self, worker: int, frame: Frame) -> None:
        """Handle a frame that is not the end of a batch's answer."""
        if frame.kind is Kind.FREED:
            self._sender.free(worker, frame)
        elif frame.kind is Kind.PONG:
            self._pool.answered_ping(worker)
        elif self._scheduler.workers.find(worker, frame.batch_id) is None:
            self._reject_answer(frame)
        else:
            self._parts.setdefault(worker, []).extend(loads(frame.body))

    def _reject_answer(self, frame: Frame) -> None:
        """A worker has answered a batch that it does not have."""
        if not self._scheduler.is_closed:  # else no caller waits for it any more
            raise TransportError(f"an answer to batch {frame.batch_id}, which it does not have")

    def _after_failure(self, frame: Frame, batch: Batch) -> list[Request]:
        """`infer` raised: returns the requests of the batch that are not tried again."""
        is_fatal = frame.kind is Kind.FATAL
        failed = self._scheduler.batch_raised(
            monotonic(),
            batch,
            out_of_memory=frame.kind is Kind.OUT_OF_MEMORY,
            is_fatal=is_fatal,
        )
        if is_fatal:
            self._reports.log_fatal_error(batch.worker)
            self._scheduler.workers.retire(batch.worker)
            self._pool.kill(batch.worker)
        return failed

    def _fail(self, requests: list[Request], error: Exception) -> None:
        """Fail requests whose answer cannot be read; their worker will be replaced."""
        failure = Failure(functools.partial(TransportError, str(error)))
        settle(self._scheduler.counters, requests, [failure] * len(requests))

    # Large answers.

    def _collect(self, frame: Frame, batch: Batch) -> None:
        """Copy the outputs of a batch out of its worker's outbox, if a caller waits for them."""
        shared = read_shared_outcomes(frame, self._links[batch.worker].outbox)
        if all(request.is_settled for request in batch.requests):
            shared.answer.release()
        elif shared.answer.size <= MOST_AT_ONCE:
            self._settle_shared(batch, shared)
        else:
            self._scheduler.workers.begin_copy_out(batch)
            self._memory.run_in_thread(
                functools.partial(shared.answer.copy, releases_gil=True),
                functools.partial(self._finish_collecting, batch, shared),
            )

    def _settle_shared(self, batch: Batch, shared: SharedOutcomes) -> None:
        settle(self._scheduler.counters, batch.requests, shared.read(len(batch.requests)))

    def _finish_collecting(
        self, batch: Batch, shared: SharedOutcomes, _: BaseException | None
    ) -> None:
        """Settle a batch whose outputs have been copied, or could not be: reading says so again."""
        if not self._scheduler.workers.end_copy_out(batch):
            return
        try:
            self._settle_shared(batch, shared)
        except Exception as error:  # noqa: BLE001  no frame is being read that could end with it
            self._fail(batch.requests, error)
            self._pool.kill_on_protocol_error(batch.worker, error)
        self._pump.notice_drained()
