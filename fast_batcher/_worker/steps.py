"""The worker's loop for a model that answers in steps. Main thread.

    receive   newcomers, and who leaves, pauses or resumes; waits only if no stream can step
    join      the oldest newcomers, as many as there are places
    step      all streams that are not paused, and whose costs fit
    send      their chunks, and which streams have ended

A stream is a batch of one request: its input arrives as any other, and an error ends it as any
other. Only its chunks are sent apart, with those of the other streams of a step.
"""

from collections.abc import Sequence
from itertools import islice
from math import inf
from time import monotonic
from typing import Any

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._arrays.stacking import lend
from fast_batcher._core.values import Failed, Order
from fast_batcher._transport.pickling import SerializedError, describe
from fast_batcher._transport.progress import BEGUN, WorkerProgress
from fast_batcher._worker.loop import judge
from fast_batcher._worker.port import BatchJob, Told, WorkerPort
from fast_batcher._worker.states import LiveStates
from fast_batcher.errors import is_kind
from fast_batcher.stepped import Grow, read_outcome

# Seconds between two frames about steps that gave no chunk, of which the parent learns only that
# the model goes on: 1 % of an `infer_timeout` of a second. A frame for each would keep the parent
# busy with a model that waits in quick steps.
SILENCE = 0.01


class StepLoop:
    """Main loop of a worker with a `SteppedModel`.

    Args:
        port: The worker's parent.
        model: The model.
        most: Most streams that run at a time; further ones wait.
        most_cost: Most that the streams cost together; infinite for no limit.
        progress: The worker's progress.
        copies: Whether chunks must not be views of an array that the model may fill again.
        begins_again: Whether a stream without a chunk may begin again.
    """

    def __init__(
        self,
        port: WorkerPort,
        model: Any,
        most: int,
        most_cost: float,
        progress: WorkerProgress,
        *,
        copies: bool,
        begins_again: bool,
    ) -> None:
        self._port = port
        self._model = model
        self._most = most
        self._progress = progress.numbers
        self._copies = copies
        # The keys are batch ids, in order of arrival.
        self._newcomers: dict[int, BatchJob] = {}
        # Newcomers, the oldest, with which `join` has raised: each joins alone.
        self._apart = 0
        # States of the streams that have joined, by batch id in order of joining; and the ids of
        # the paused ones.
        self._states = LiveStates(model)
        self._paused: set[int] = set()
        # The rest is used with a limit alone: the costs of newcomers and streams; costs that do not
        # fit yet, of streams that grow; streams that have chunks.
        self._most_cost, self._begins_again = most_cost, begins_again
        self._costs: dict[int, float] = {}
        self._wanted: dict[int, float] = {}
        self._heard: set[int] = set()
        # No newcomer joins before a stream has left, because one has made room for others.
        self._is_full = False
        # Streams that fit into memory, as far as is known, and the streams that have left since
        # then. One more is tried when as many have left as fit.
        self._fitting, self._left = most, 0
        # STOP has come: the streams that are here are finished.
        self._is_stopping = False
        # Whether the last step has lost the device.
        self._is_fatal = False
        # The moment of the last frame about a step.
        self._sent_at = 0.0

    def run(self) -> None:
        """Step until STOP and the end of all streams, or until the parent closes its end."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Take what has arrived, and compute a step; False at the end, or if nothing is to do."""
        if self._is_fatal or not self._receive():
            return False
        self._join()
        if len(self._states) > len(self._paused):
            self._step()
        # The model has dropped the inputs of streams that have ended.
        self._port.report_freed()
        return True

    def release_all(self) -> None:
        """Release the states of the streams that are left, before the model is closed."""
        self._states.release_all()

    # Receiving.

    def _receive(self) -> bool:
        """Take what has arrived, and wait while there is nothing to do; False at the end."""
        while self._is_idle() or self._port.has_arrived():
            if self._is_stopping and not (self._states or self._newcomers):
                return False
            arrived = self._port.receive()
            if arrived is None:
                return False
            if isinstance(arrived, BatchJob):
                self._welcome(arrived)
            else:
                self._obey(arrived)
        return True

    def _is_idle(self) -> bool:
        return len(self._states) == len(self._paused) and not self._count_joining()

    def _count_joining(self) -> int:
        """Return how many newcomers may join now."""
        if self._states and (self._is_full or not self._model.joins_running):
            return 0
        places = min(self._most, self._fitting) - len(self._states)
        count = min(places, len(self._newcomers))
        if count and self._most_cost < inf:
            cost = self._sum_costs()
            for joining, found in enumerate(islice(self._newcomers, count)):
                cost += self._costs[found]
                if cost > self._most_cost and (self._states or joining):
                    return joining
        return count

    def _sum_costs(self) -> float:
        return sum([self._costs[found] for found in self._states])

    def _obey(self, told: Told) -> None:
        order, batch_id = told
        if order is Order.STOP:
            self._is_stopping = True
        elif order is Order.PAUSE:
            if batch_id in self._states:
                self._paused.add(batch_id)
        elif order is Order.RESUME:
            self._paused.discard(batch_id)
        # It leaves, because no caller waits; it may have ended meanwhile.
        elif batch_id in self._states or batch_id in self._newcomers:
            self._newcomers.pop(batch_id, None)
            self._fail(batch_id, Failed.SKIPPED)

    def _welcome(self, job: BatchJob) -> None:
        if job.failed is None and job.errors:
            job.fail(Failed.FOR_GOOD, job.errors[0])
        if job.failed is None:
            self._newcomers[job.batch_id] = job
            if self._most_cost < inf:
                self._costs[job.batch_id] = job.cost
        else:
            self._port.answer(job)

    def _release(self, batch_ids: Sequence[int]) -> None:
        """Forget streams."""
        self._paused.difference_update(batch_ids)
        self._heard.difference_update(batch_ids)
        for found in batch_ids if self._costs else ():
            self._costs.pop(found, None)
            self._wanted.pop(found, None)
        count = self._states.release(batch_ids)
        if not count:
            return
        self._is_full = False
        self._left += count
        if self._left > self._fitting:
            self._fitting, self._left = self._fitting + 1, 0

    # Joining.

    def _join(self) -> None:
        """Begin the oldest newcomers, as many as there are places."""
        count = self._count_joining()
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
            how, failure = judge(error)
            if len(jobs) > 1 and how is not Failed.FATAL:
                self._apart = len(jobs)
                self._newcomers = {job.batch_id: job for job in jobs} | self._newcomers
            else:
                self._fail_all([job.batch_id for job in jobs], how, failure)
            return
        finally:
            lend(())
        for job, state in zip(jobs, states, strict=True):
            job.inputs, job.pieces = [], []
            if is_kind(state, BaseException):
                self._fail(job.batch_id, *judge(state))
            else:
                self._states[job.batch_id] = state

    def _fail_all(self, batch_ids: list[int], how: Failed, failure: SerializedError) -> None:
        """End streams with an error; the parent ends the worker at the first fatal one."""
        earlier = Failed.RAISED if how is Failed.FATAL else how
        for batch_id in batch_ids[:-1]:
            self._fail(batch_id, earlier, failure)
        self._fail(batch_ids[-1], how, failure)

    def _fail(self, batch_id: int, how: Failed, *failure: SerializedError) -> None:
        """End a stream with an error."""
        self._is_fatal |= how is Failed.FATAL
        self._release([batch_id])
        job = BatchJob(batch_id)
        job.fail(how, *failure)
        self._port.answer(job)

    def _evict(self, batch_id: int, failure: SerializedError) -> None:
        """End a stream that makes room for older ones; the parent lets it begin again, or fails."""
        self._fail(batch_id, Failed.EVICTED, failure)
        self._is_full = True

    # Steps.

    def _choose(self) -> list[int]:
        """Return the streams of the next step, oldest first: not paused, with costs that fit."""
        running = [found for found in self._states if found not in self._paused]
        if not self._wanted:
            return running
        costs, wanted = self._costs, self._wanted
        while len(running) > 1 and self._begins_again and running[-1] not in self._heard:
            if sum([wanted.get(found, costs[found]) for found in self._states]) <= self._most_cost:
                break
            self._evict(running.pop(), describe(MemoryError("older streams needed its place")))
        fitting, total = [], self._sum_costs()
        for found in running:
            more = wanted.get(found, costs[found]) - costs[found]
            if more <= 0 or total + more <= self._most_cost:
                total += more
                costs[found] = wanted.pop(found, costs[found])
                fitting.append(found)
        if not fitting:  # one always runs
            fitting = running[:1]
            costs[fitting[0]] = wanted.pop(fitting[0])
        return fitting

    def _step(self) -> None:
        """Compute a step, and send its chunks."""
        running = self._choose()
        states = [self._states[found] for found in running]
        began = monotonic()
        try:
            outcomes = list_outputs(
                self._model.step(states), len(running), "step returned", copies=self._copies
            )
        except BaseException as error:  # noqa: BLE001  as in `BatchLoop.compute`
            how, failure = judge(error)
            # A generator that has raised cannot be tried again.
            if how is Failed.OUT_OF_MEMORY and len(running) > 1 and self._model.joins_running:
                self._evict(running[-1], failure)
                self._fitting, self._left = len(self._states), 0
            else:
                self._fail_all(running, how, failure)
            return
        self._send(running, outcomes, began)

    def _send(self, running: list[int], outcomes: list[Any], began: float) -> None:
        """Send the chunks of a step; streams that are done, or have failed, end with it."""
        heard: list[int] = []
        chunks: list[Any] = []
        ended: list[int] = []
        grown: dict[int, float] = {}
        for batch_id, outcome in zip(running, outcomes, strict=True):
            chunk, is_last = read_outcome(outcome)
            if is_last:
                ended.append(batch_id)
            if chunk is not None:
                heard.append(batch_id)
                chunks.append(chunk)
            if self._most_cost < inf and issubclass(type(outcome), Grow):
                grown[batch_id] = outcome.cost
        if self._most_cost < inf:
            self._heard.update(heard)
            self._wanted |= grown
        if ended:
            self._release(ended)
        now = monotonic()
        if not (heard or ended or grown) and now < self._sent_at + SILENCE:
            return
        self._sent_at = now
        job = BatchJob(0)
        job.step, job.outputs, job.seconds = (heard, ended, grown), chunks, now - began
        self._port.answer(job)
