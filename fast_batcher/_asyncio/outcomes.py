"""Frames of the workers to outcomes. API process, the event loop's thread.

An outcome is an output, or a `Failure`. A batch is answered by one frame in the usual case; its
outcomes may also come in several, or lie in the worker's outbox.
"""

from typing import Any

from fast_batcher._asyncio.futures import Failure
from fast_batcher._parent.worker import WorkerLink
from fast_batcher._shared_memory.outbox_reader import Answer
from fast_batcher._transport.codec import RemoteFailure, loads, one_line
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import InferenceError, TransportError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_OUTPUT_ATOMS = Kind.OUTPUT_ATOMS
# Frames that are one failure for every request of their batch.
FAILURE_KINDS = frozenset({Kind.FAILED, Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})


class OutcomeReader:
    """Reads the answers of the ready workers."""

    def __init__(self) -> None:
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

    def keep_part(self, worker: int, frame: Frame) -> None:
        """Keep a part of the outcomes of a batch until the last one comes."""
        self._parts.setdefault(worker, []).extend(loads(frame.body))

    def read(self, worker: int, frame: Frame, count: int) -> list[Any]:
        """The outcomes of a batch by position.

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

    def find_shared(self, worker: int, frame: Frame) -> "SharedOutcomes":
        """The outcomes that a worker has left in its outbox.

        Raises:
            TransportError: The worker has left none.
            Exception: The frame cannot be read.
        """
        start, sizes, frozen, items, failures = loads(frame.body)
        link = self._links.get(worker)
        outbox = None if link is None else link.outbox
        if outbox is None:
            raise TransportError("a worker without an outbox has left something there")
        return SharedOutcomes(outbox.find(start, sizes, frozen, items), failures)


class SharedOutcomes:
    """The outcomes of a batch that are still in an outbox.

    Args:
        answer: The outputs, with anything in the place of a failure.
        failures: The failures by position.
    """

    def __init__(self, answer: Answer, failures: dict[int, RemoteFailure]) -> None:
        self.answer = answer
        self._failures = failures

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that has been done, and free their memory.

        Raises:
            TransportError: They answer no batch of `count` requests.
        """
        outcomes = self.answer.load(_unreadable)
        _check_count(outcomes, count)
        try:
            for position, failure in self._failures.items():
                outcomes[position] = Failure(RemoteFailure(*failure).to_error)
        except (AttributeError, TypeError, IndexError) as error:
            text = f"failures came back that are not failures: {one_line(error)}"
            raise TransportError(text) from error
        return outcomes


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
