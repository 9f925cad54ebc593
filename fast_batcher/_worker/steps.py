"""The worker's loop for a model that answers in steps. Main thread.

    receive   newcomers, and who leaves, pauses or resumes; waits only if no stream can step
    join      the oldest newcomers, as many as there are places
    step      all streams that are not paused
    send      STEP, and their chunks as the answer to a batch

A stream is a batch of one request: its input arrives as any other, and an error ends it as any
other. Only its chunks come in frames of their own, with those of the other streams of a step.
"""

import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

from fast_batcher._arrays.joining import list_outputs
from fast_batcher._arrays.stacking import lend
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Frame, Kind, pack_header
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import BEGUN, WorkerProgress
from fast_batcher._worker.loop import (
    BATCHES,
    BatchJob,
    BatchLoop,
    PolledChannel,
    ReplyEncoder,
    judge,
)
from fast_batcher.errors import forget_frames, is_kind
from fast_batcher.stepped import read_outcome

logger = logging.getLogger("fast_batcher.worker")

# Seconds between two frames about steps that gave no chunk, of which the parent learns only that
# the model goes on: 1 % of an `infer_timeout` of a second. A frame for each would keep the parent
# busy with a model that waits in quick steps.
SILENCE = 0.01


class StepLoop:
    """Main loop of a worker with a `SteppedModel`.

    Args:
        loop: Reads inputs, and sends the answers that end a stream.
        channel: The channel of `loop`.
        model: The model.
        most: Most streams that run at a time; further ones wait.
        progress: The progress of `loop`.
        encoder: Encodes the chunks of a step as the outputs of a batch.
        copies: Whether chunks must not be views of an array that the model may fill again.
    """

    def __init__(
        self,
        loop: BatchLoop,
        channel: PolledChannel,
        model: Any,
        most: int,
        progress: WorkerProgress,
        encoder: ReplyEncoder,
        *,
        copies: bool = False,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._model = model
        self._most = most
        self._progress = progress.numbers
        self._encoder = encoder
        self._copies = copies
        # The keys are batch ids, in order of arrival.
        self._newcomers: dict[int, BatchJob] = {}
        # Newcomers, the oldest, with which `join` has raised: each joins alone.
        self._apart = 0
        # States of the streams that have joined, by batch id in order of joining; and the ids of
        # the paused ones.
        self._states: dict[int, Any] = {}
        self._paused: set[int] = set()
        # STOP has come: the streams that are here are finished.
        self._is_stopping = False
        # Whether the last step has lost the device.
        self._is_fatal = False
        # The moment of the last frame about a step.
        self._sent_at = 0.0

    def run(self) -> None:
        """Step until STOP and the end of all streams, or until the parent closes its end."""
        while not self._is_fatal and self._receive():
            self._join()
            if len(self._states) > len(self._paused):
                self._step()
            # The model has dropped the inputs of streams that have ended.
            self._loop.report_freed()

    # Receiving.

    def _receive(self) -> bool:
        """Take what has arrived, and wait while there is nothing to do; False at the end."""
        while self._is_idle() or self._channel.has_arrived():
            if self._is_stopping and not (self._states or self._newcomers):
                return False
            frame = self._channel.receive()
            if frame is None:
                return False
            self._take(frame)
        return True

    def _is_idle(self) -> bool:
        return len(self._states) == len(self._paused) and not (self._newcomers and self._room())

    def _room(self) -> int:
        """Return how many newcomers may join now."""
        if self._states and not self._model.joins_running:
            return 0
        return self._most - len(self._states)

    def _take(self, frame: Frame) -> None:
        kind, batch_id = frame.kind, frame.batch_id
        if kind == Kind.STOP:
            self._is_stopping = True
        elif kind == Kind.PING:
            self._loop.answer_ping()
        elif kind == Kind.PAUSE:
            if batch_id in self._states:
                self._paused.add(batch_id)
        elif kind == Kind.RESUME:
            self._paused.discard(batch_id)
        elif kind == Kind.LEAVE:
            self._dismiss(batch_id)
        elif kind in BATCHES:
            self._welcome(self._loop.read(frame))
        else:
            self._loop.note(frame)

    def _welcome(self, job: BatchJob) -> None:
        if job.reply is None and job.errors:
            job.fail(Kind.FAILED, job.errors[0])
        if job.reply is None:
            self._newcomers[job.batch_id] = job
        else:
            self._loop.answer(job)

    def _dismiss(self, batch_id: int) -> None:
        """Let a stream leave for which no caller waits; it may have ended meanwhile."""
        if batch_id in self._states or batch_id in self._newcomers:
            self._newcomers.pop(batch_id, None)
            self._release([batch_id])
            self._channel.send(Kind.SKIPPED, batch_id)
            self._loop.report_freed()

    def _release(self, batch_ids: Sequence[int]) -> None:
        """Forget streams that have joined."""
        self._paused.difference_update(batch_ids)
        states = [self._states.pop(found) for found in batch_ids if found in self._states]
        if not states:
            return
        try:
            self._model.leave(states)
        except BaseException:
            logger.exception("the model's leave() raised")

    # Joining.

    def _join(self) -> None:
        """Begin the oldest newcomers, as many as there are places."""
        count = min(self._room(), len(self._newcomers))
        if count > 0 and self._apart:
            count, self._apart = 1, self._apart - 1
        if count > 0:
            jobs = [self._newcomers.pop(found) for found in list(self._newcomers)[:count]]
            self._progress[BEGUN] = jobs[-1].batch_id + 1
            self._begin(jobs)

    def _begin(self, jobs: list[BatchJob]) -> None:
        """Begin streams together; if that raises, each alone, when there is room."""
        try:
            lend([piece for job in jobs for piece in job.pieces])
            inputs = [value for job in jobs for value in job.inputs]
            states = list_outputs(
                self._model.join(inputs), len(jobs), "join returned", copies=False
            )
        except BaseException as error:  # noqa: BLE001  as in `BatchLoop.compute`
            kind, failure = judge(error)
            forget_frames(error)
            if len(jobs) > 1 and kind != Kind.FATAL:
                self._apart = len(jobs)
                self._newcomers = {job.batch_id: job for job in jobs} | self._newcomers
            else:
                self._fail_all([job.batch_id for job in jobs], kind, failure)
            return
        finally:
            lend(())
        for job, state in zip(jobs, states, strict=True):
            job.inputs, job.pieces = [], []
            if is_kind(state, BaseException):
                self._fail(job.batch_id, *judge(state))
            else:
                self._states[job.batch_id] = state

    def _fail_all(self, batch_ids: list[int], kind: int, failure: SerializedError) -> None:
        """End streams with an error; the parent ends the worker at the first FATAL frame."""
        earlier = Kind.RAISED if kind == Kind.FATAL else kind
        for batch_id in batch_ids[:-1]:
            self._fail(batch_id, earlier, failure)
        self._fail(batch_ids[-1], kind, failure)

    def _fail(self, batch_id: int, kind: int, failure: SerializedError) -> None:
        """End a stream with an error."""
        self._is_fatal |= kind == Kind.FATAL
        self._release([batch_id])
        self._channel.send(kind, batch_id, pickling.dumps(failure))

    # Steps.

    def _step(self) -> None:
        """Compute a step of the streams that are not paused, and send their chunks."""
        running = [found for found in self._states if found not in self._paused]
        states = [self._states[found] for found in running]
        began = monotonic()
        try:
            outcomes = list_outputs(
                self._model.step(states), len(running), "step returned", copies=self._copies
            )
        except BaseException as error:  # noqa: BLE001  as in `BatchLoop.compute`
            kind, failure = judge(error)
            forget_frames(error)
            self._fail_all(running, kind, failure)
            return
        self._send(running, outcomes, began)

    def _send(self, running: list[int], outcomes: list[Any], began: float) -> None:
        """Send the chunks of a step; streams that are done, or have failed, end with it."""
        heard: list[int] = []
        chunks: list[Any] = []
        ended: list[int] = []
        for batch_id, outcome in zip(running, outcomes, strict=True):
            chunk, is_last = read_outcome(outcome)
            if is_last:
                ended.append(batch_id)
            if chunk is not None:
                heard.append(batch_id)
                chunks.append(chunk)
        if ended:
            self._release(ended)
        now = monotonic()
        if not (heard or ended) and now < self._sent_at + SILENCE:
            return
        self._sent_at = now
        *fragments, (kind, body) = self._encoder.pack(chunks, {})
        for fragment_kind, fragment in fragments:
            self._channel.send(fragment_kind, running[0], fragment)
        step = pickling.dumps((heard, ended, kind))
        ahead = pack_header(Kind.STEP, len(step), 0, 0.0) + step
        self._channel.send(Kind.CHUNKS, 0, body, now - began, ahead)
