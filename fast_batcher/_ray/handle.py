"""`RayWorker`: a worker that is an actor of a Ray cluster, as its pool sees it. Host process.

    loop's thread     sends frames; reads answers, in the order of their arrival
    call thread       makes the calls (`Cluster.call`)
    Ray's thread      brings the answers

A frame that completes a batch is one call, together with the frames before it.
"""

import logging
import pickle
import signal
import socket
import sys
import warnings
from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from enum import Enum
from typing import Any, NamedTuple

from fast_batcher._core.values import Order, Report
from fast_batcher._parent.sending import FrameWorker
from fast_batcher._parent.worker_handle import Exit, WorkerState
from fast_batcher._ray.cluster import CONNECT_TIMEOUT, PROBE_TIMEOUT, Cluster
from fast_batcher._ray.steps import StepCalls
from fast_batcher._shared_memory.inputs import unpack_layout
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Frame, Frames, Kind, Reservation
from fast_batcher._transport.logs import unpack_record
from fast_batcher.errors import WorkerStartupError

logger = logging.getLogger("fast_batcher")

_ORDERS = frozenset(Order)
# Seconds to wait, after the death of an actor, for the state of its node.
LOOK_LIMIT = 5.0
# Most characters of Ray's message about a death.
MAX_DEATH_TEXT = 500


class Purpose(Enum):
    """Purpose of a call."""

    WATCH = "watch"
    PLACE = "place"
    LOAD = "load"
    BATCH = "batch"
    STEP = "step"
    PING = "ping"
    STOP = "stop"


class Result(NamedTuple):
    """Result of a call."""

    purpose: Purpose
    # -1 for no batch; the number of a step.
    batch_id: int
    # An exception if the call has failed.
    value: Any


class RayWorker(FrameWorker):
    """A worker that is an actor."""

    def __init__(self, cluster: Cluster, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cluster = cluster
        # The actor; None before the call thread has made it, and if that failed. Call thread.
        self._actor: Any = None
        # A pair of sockets, of which Ray's thread closes the second when the actor is dead; None
        # before `spawn` and after `reap`.
        self._lifeline: tuple[socket.socket, socket.socket] | None = None
        # Id of its node in the cluster.
        self._node_id = ""
        # Results that were not read yet.
        self._results: deque[Result] = deque()
        # Frames of a batch of which the last has not come.
        self._ahead: list[Frame] = []
        # Frames behind a reservation.
        self._backlog: deque[Reservation | tuple[int, int, bytes]] = deque()
        # Batches that the actor has, oldest first.
        self._open: dict[int, None] = {}
        # The steps of a `SteppedModel`; and whether the actor stops when its streams have ended.
        self._steps = StepCalls(self._step_soon) if self._has_steps else None
        self._stops_later = False
        # Whether `stop` has been answered.
        self._has_stopped = False
        # The first error that tells of the actor's death, and the limit of the wait for its node.
        self._failure: BaseException | None = None
        self._look_timer: TimerHandle | None = None
        # Whether its node is dead, or cannot be reached.
        self._is_node_lost = False

    @property
    def title(self) -> str:
        """Name in logs: the batcher, the worker's index, and the actor's process and node."""
        where = f"pid {self.pid} on {self.node}" if self.is_placed else "an actor without a node"
        return f"{self._name}: worker {self.index} ({where})"

    # Start.

    def spawn(self) -> None:
        """Connect to the cluster, and begin to make the actor. Spawner thread."""
        self._cluster.connect()
        self._lifeline = socket.socketpair()
        self._cluster.call(self._make_actor)

    def _make_actor(self) -> None:
        from fast_batcher._ray.actor import ModelActor

        workers = self._cluster.workers
        options = {
            "num_cpus": workers.num_cpus,
            "num_gpus": workers.num_gpus,
            "resources": None if workers.resources is None else dict(workers.resources),
            "scheduling_strategy": workers.scheduling_strategy,
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": {"watch": 1, "skip": 1},
            "enable_task_events": False,
        }
        given = {name: value for name, value in options.items() if value is not None}
        try:
            actor = self._actor = self._cluster.ray.remote(**given)(ModelActor).remote()
            self._await(Purpose.WATCH, actor.watch.remote())
            self._await(Purpose.PLACE, actor.place.remote())
        except Exception as error:  # noqa: BLE001  of Ray: it refuses an option
            self._bring(Result(Purpose.PLACE, -1, error))

    def attach(self, loop: AbstractEventLoop) -> None:
        """Read the results on this event loop."""
        self._loop = loop
        self.is_attached = True
        self._cluster.unplaced.add(self.id)
        self._read_results()

    @property
    def is_alive(self) -> bool:
        """Whether it was spawned and has not been reaped."""
        return self._lifeline is not None

    @property
    def start_limit(self) -> float:
        """Seconds for the connection, for the placement, or for the loading of the model."""
        if self.is_placed:
            return super().start_limit
        if self.is_attached:
            return self._cluster.workers.placement_timeout
        # The workers connect one after the other; the probes of the first ones may fail.
        return PROBE_TIMEOUT * self._settings.most_workers + 2 * CONNECT_TIMEOUT

    def make_timeout_error(self) -> WorkerStartupError:
        """Make the error of a worker that has no node, or has not loaded its model in time."""
        if self.is_placed:
            return super().make_timeout_error()
        if not self.is_attached:
            return WorkerStartupError(
                f"worker {self.index}: the Ray cluster has not answered within "
                f"{self.start_limit:g} seconds"
            )
        seconds = self._cluster.workers.placement_timeout
        return WorkerStartupError(
            f"worker {self.index} had no node within placement_timeout={seconds:g} seconds: "
            f"{self._cluster.describe_wait() or 'the Ray cluster does not answer'}"
        )

    def _take_place(self, place: dict[str, Any]) -> None:
        from fast_batcher._ray.actor import find_versions

        self.pid, self.node, self._node_id = place["pid"], place["node"], place["node_id"]
        self._cluster.unplaced.discard(self.id)
        differences = list_differing(find_versions(), place["versions"])
        if differences:
            text = (
                f"worker {self.index}: the node {self.node} has {', '.join(differences)} of this "
                "machine; install the same versions"
            )
            self._events.start_failed(self, WorkerStartupError(text))
            return
        self._events.worker_placed(self)
        self._cluster.call(self._load)

    def _load(self) -> None:
        from fast_batcher._ray.actor import Levels

        levels = Levels(
            logging.getLogger().level,
            logging.getLogger("fast_batcher").getEffectiveLevel(),
            warnings.showwarning.__module__ == "logging",
        )
        settings = self.make_worker_settings(max(1, int(self._cluster.workers.num_cpus)))
        self._call(Purpose.LOAD, "load", sys.path, self.model_spec.pickled, settings, levels)

    # Calls. Call thread.

    def _call(self, purpose: Purpose, method: str, *arguments: Any, batch_id: int = -1) -> None:
        """Call the actor; the result, or Ray's error, arrives later."""
        if self._actor is None:  # it is dead, and so was told
            return
        try:
            reference = getattr(self._actor, method).remote(*arguments)
        except Exception as error:  # noqa: BLE001  of Ray: the actor is dead, or the store is full
            self._bring(Result(purpose, batch_id, error))
        else:
            self._await(purpose, reference, batch_id)

    def _await(self, purpose: Purpose, reference: Any, batch_id: int = -1) -> None:
        def bring(future: Future[Any]) -> None:
            error = future.exception()
            value = future.result() if error is None else error
            self._bring(Result(purpose, batch_id, value))

        reference.future().add_done_callback(bring)

    def _bring(self, result: Result) -> None:
        """Hand a result over to the loop. Any thread."""
        self._results.append(result)
        lifeline = self._lifeline
        if lifeline is not None and isinstance(result.value, BaseException):
            lifeline[1].close()
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._read_results, context=Context())

    def _step_soon(self, number: int, frames: list[Frame], rows: list[tuple[int, int]]) -> None:
        self._cluster.call(lambda: self._compute(number, frames, rows, Purpose.STEP))

    def _compute(
        self, number: int, frames: list[Frame], rows: list[tuple[int, int]], purpose: Purpose
    ) -> None:
        """Call the actor with a batch or a step; Ray copies large arguments into its store."""
        slabs = self._slabs
        buffers = []
        if slabs is not None:
            try:
                buffers = [pickle.PickleBuffer(slabs.read(*row)) for row in rows]
            except OSError:  # the memory is closed, and the pool ends
                return
        # Ray pickles no bytes.
        packed = pickling.dumps(frames)
        method = "compute" if purpose is Purpose.BATCH else "step"
        self._call(purpose, method, packed, *buffers, batch_id=number)

    # Frames to the actor.

    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        """Send a frame after the frames that wait for a reservation."""
        if self._backlog:
            self._backlog.append((kind, batch_id, body))
        elif self.is_alive:
            self._send_now(kind, batch_id, body)

    def _send_now(self, kind: int, batch_id: int, body: bytes) -> None:
        if kind == Kind.PING:
            self._cluster.call(lambda: self._call(Purpose.PING, "ping"))
            return
        if kind == Kind.STOP:
            if self._steps is not None and self._open and self.state is WorkerState.READY:
                self._stops_later = True
                return
            self._cluster.call(lambda: self._call(Purpose.STOP, "stop"))
            return
        self._ahead.append(Frame(kind, batch_id, 0.0, body))
        # The end of a session goes with the next batch; that of a stream is awaited.
        if kind == Kind.PART or (kind == Kind.LEAVE and self._steps is None):
            return
        frames, self._ahead = self._ahead, []
        rows: list[tuple[int, int]] = []
        if kind == Kind.ROWS:
            rows = [
                (start, count * unpack_layout(layout).nbytes)
                for layout, start, count in pickling.loads(body)[0]
            ]
        if kind not in _ORDERS:
            self._open[batch_id] = None
        if self._steps is not None:
            self._steps.add(frames, rows, batch_id)
        else:
            self._cluster.call(lambda: self._compute(batch_id, frames, rows, Purpose.BATCH))

    def skip(self, batch_id: int) -> None:
        if self.is_alive:
            self._cluster.call(lambda: self._skip_now(batch_id))

    def _skip_now(self, batch_id: int) -> None:
        if self._actor is not None:
            with suppress(Exception):  # it is dead, which the other calls tell
                self._actor.skip.remote(batch_id)

    def reserve(self) -> Reservation:
        """Reserve a position; as `LoopChannel.reserve`."""
        reservation = Reservation()
        self._backlog.append(reservation)
        return reservation

    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send frames at their position; as `LoopChannel.fill`."""
        reservation.frames = frames
        while self._backlog and self.is_alive:
            head = self._backlog[0]
            if not isinstance(head, Reservation):
                self._send_now(*head)
            elif head.frames is None:
                return
            else:
                for frame in head.frames:
                    self._send_now(*frame)
            self._backlog.popleft()

    def is_sending(self) -> bool:
        """Return whether frames are not ready yet."""
        return bool(self._backlog)

    # Results.

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; none arrives in part."""
        self._read_results()
        return False

    def _read_results(self) -> None:
        while self._results:
            purpose, batch_id, value = self._results.popleft()
            if not self.is_alive:
                continue
            if isinstance(value, BaseException):
                self._fail(value)
            elif purpose is Purpose.PLACE:
                if self.state is WorkerState.LOADING:
                    self._take_place(value)
            elif purpose is Purpose.STEP:
                self._take_step(batch_id, value)
            else:
                self._take(purpose, batch_id, value)

    def _take(self, purpose: Purpose, batch_id: int, answer: bytes) -> None:
        if purpose is Purpose.STOP:
            self._has_stopped = True
            self._kill_actor()
        elif purpose is Purpose.BATCH:
            self._open.pop(batch_id, None)
            self.leases.pop(batch_id, None)
        self._read(answer)

    def _take_step(self, number: int, answer: tuple[bytes, bool]) -> None:
        assert self._steps is not None, "a step was asked for"
        for answered, streams in self._steps.take(number, answer):
            for stream in streams:  # the actor has copied their inputs
                self.leases.pop(stream, None)
            self._read(answered)
        if self._stops_later and not self._open:
            self._stops_later = False
            self._send_now(Kind.STOP, 0, b"")

    def _read(self, answer: bytes) -> None:
        try:
            records, frames = pickling.loads(answer)
            for packed in records:
                self._log(packed)
            for frame in frames:
                self._dispatch(frame)
        except Exception as error:  # noqa: BLE001  as in `LoopChannel`
            self.kill_on_protocol_error(error)

    def _take_report(self, batch_id: int, report: Report) -> None:
        super()._take_report(batch_id, report)
        for ended in [batch_id] if report.step is None else report.step[1]:
            self._open.pop(ended, None)

    def _log(self, packed: bytes) -> None:
        record = unpack_record(packed)
        attributes = {"worker": self.index, "worker_pid": self.pid, "model": self._name}
        vars(record).update(attributes, worker_node=self.node)
        target = logging.getLogger(record.name)
        if target.isEnabledFor(record.levelno):
            target.handle(record)

    # Death.

    def _fail(self, error: BaseException) -> None:
        """Handle the failure of a call."""
        if self._failure is not None:
            return
        self._failure = error
        if self.state is WorkerState.LOADING and not _tells_of_death(error):
            named = WorkerStartupError(
                f"worker {self.index} cannot be started: {_describe_failure(error)}"
            )
            named.__cause__ = error
            self._events.start_failed(self, named)
        # It may live, if it is unavailable only.
        self._kill_actor()
        assert self._loop is not None, "results are read on a loop"
        self._look_timer = self._loop.call_later(LOOK_LIMIT, self._died, context=Context())
        self._cluster.ask(self._take_nodes)

    def _take_nodes(self, alive: frozenset[str]) -> None:
        """Note whether the actor's node lives. Node thread."""
        self._is_node_lost = self.is_placed and self._node_id not in alive
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._died, context=Context())

    # Progress and memory.

    def read_begun(self) -> int | None:
        """Return None: the actor's progress is not known here."""
        return None

    # End.

    def disconnect(self) -> None:
        """Send no more frames; the actor ends after its current batch."""
        self.ignore()
        if self.is_alive and not self.was_asked_to_end:
            self.was_asked_to_end = True
            self._send_now(Kind.STOP, 0, b"")

    def signal(self, number: signal.Signals) -> None:
        """Kill the actor, whatever the signal: Ray knows no other."""
        if self.is_alive:
            self._kill_actor()

    def _kill_actor(self) -> None:
        self._cluster.call(self._kill_now)

    def _kill_now(self) -> None:
        if self._actor is not None:
            with suppress(Exception):  # it is dead already
                self._cluster.ray.kill(self._actor)

    @property
    def death_fd(self) -> int:
        """Descriptor that is readable once the actor is dead; -1 after `reap`."""
        return -1 if self._lifeline is None else self._lifeline[0].fileno()

    def reap(self) -> Exit | None:
        """Release everything of a dead actor; None if that was done before."""
        if self._lifeline is None:
            return None
        for end in self._lifeline:
            end.close()
        self._lifeline = None
        self._cluster.unplaced.discard(self.id)
        self._cluster.call(self._drop_actor)
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        self._ahead.clear()
        self._backlog.clear()
        self._end_leases(None)
        is_ours = self.state is WorkerState.ENDING
        failure = self._failure
        begun = self._find_begun()
        self._open.clear()
        return Exit(
            text="an unknown end" if failure is None else _describe_failure(failure),
            by_signal=True,
            is_clean=self._has_stopped,
            is_ours=is_ours,
            taken=begun,
            begun=begun,
            may_be_out_of_memory=not is_ours and _is_out_of_memory(failure),
            is_node_lost=self._is_node_lost or _is_unavailable(failure),
        )

    def _drop_actor(self) -> None:
        self._actor = None

    def _find_begun(self) -> int | None:
        """Return the last batch that it may have begun.

        The oldest batch has begun. The others may have, if the answers before were lost with the
        actor: then they count as begun, where a request must not be computed twice.
        """
        if not self._open or (self._is_node_lost and self._settings.idempotent):
            return None
        return min(self._open) if self._settings.idempotent else max(self._open)


def list_differing(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Name the versions in which a node differs from this machine."""
    return [
        f"{name} {theirs.get(name, 'without a version')} in place of the {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]


def _tells_of_death(error: BaseException) -> bool:
    """Return whether an error says that the actor is dead, and not that our code has raised."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    return isinstance(error, NodeDiedError | OutOfMemoryError)


def _is_unavailable(error: BaseException | None) -> bool:
    from ray.exceptions import ActorUnavailableError

    return isinstance(error, ActorUnavailableError)


def _is_out_of_memory(error: BaseException | None) -> bool:
    from ray.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)


def _describe_failure(error: BaseException) -> str:
    """Describe an error of Ray in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_DEATH_TEXT]}"
