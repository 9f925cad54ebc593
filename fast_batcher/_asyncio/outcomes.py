"""Frames of the workers to outcomes. API process, the event loop's thread.

An outcome is an output, or a `Failure`. A batch is answered by one frame in the usual case; its
outcomes may also come in several, or lie in the worker's outbox.
"""

from typing import Any, NamedTuple

from fast_batcher._asyncio.futures import Failure
from fast_batcher._shared_memory.outbox_reader import Answer, OutboxReader
from fast_batcher._transport.codec import RemoteFailure, loads, one_line
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import InferenceError, TransportError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_OUTPUT_ATOMS = Kind.OUTPUT_ATOMS
# Frames that are one failure for every request of their batch.
FAILURE_KINDS = frozenset({Kind.FAILED, Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})


def read_outcomes(frame: Frame, parts: list[Any] | None, count: int) -> list[Any]:
    """The outcomes of a batch by position.

    Args:
        frame: The last frame of the batch's answer.
        parts: What came in frames before it, or None.
        count: Requests in the batch.

    Raises:
        TransportError: The frame answers no batch of `count` requests.
    """
    outcomes: list[Any]
    if frame.kind is _OUTPUT_ATOMS:
        outcomes = loads(frame.body)
    elif frame.kind is Kind.OUTPUTS:
        outcomes = [_read_item(item) for item in (parts or []) + loads(frame.body)]
    elif frame.kind in FAILURE_KINDS:
        outcomes = [Failure(RemoteFailure(*loads(frame.body)).to_error)] * count
    else:
        raise TransportError(f"a worker answered with {frame.kind.name}")
    if len(outcomes) != count:
        raise _wrong_count(len(outcomes), count)
    return outcomes


class SharedOutcomes(NamedTuple):
    """The outcomes of a batch that are still in an outbox."""

    # The outputs, with anything in the place of a failure.
    answer: Answer
    # The failures by position.
    failures: dict[int, RemoteFailure]

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that has been done, and free their memory.

        Raises:
            TransportError: They answer no batch of `count` requests.
        """
        outcomes = self.answer.load(_unreadable)
        if len(outcomes) != count:
            raise _wrong_count(len(outcomes), count)
        try:
            for position, failure in self.failures.items():
                outcomes[position] = Failure(RemoteFailure(*failure).to_error)
        except (AttributeError, TypeError, IndexError) as error:
            text = f"failures came back that are not failures: {one_line(error)}"
            raise TransportError(text) from error
        return outcomes


def read_shared_outcomes(frame: Frame, outbox: OutboxReader | None) -> SharedOutcomes:
    """The outcomes that a worker has left in its outbox.

    Raises:
        TransportError: The worker has no outbox.
        Exception: The frame cannot be read.
    """
    start, sizes, frozen, items, failures = loads(frame.body)
    if outbox is None:
        raise TransportError("a worker without an outbox has left something there")
    return SharedOutcomes(outbox.find(start, sizes, frozen, items), failures)


def _read_item(item: Any) -> Any:
    """The outcome of one request, which was pickled by itself."""
    try:
        return loads(item) if isinstance(item, bytes) else Failure(RemoteFailure(*item).to_error)
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        return _unreadable(error)


def _wrong_count(found: int, count: int) -> TransportError:
    return TransportError(f"{found} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(lambda: InferenceError(text))
