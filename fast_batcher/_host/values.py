"""Access of the host's session to inputs and outputs, which are bytes to it. Host process."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Batch, Failure, Request
from fast_batcher._host.protocol import MAX_RANGES, OpaqueError, Pickled
from fast_batcher._parent.sending import BatchSender, SenderEvents
from fast_batcher._parent.staging import MemoryService
from fast_batcher._parent.worker_process import WorkerLink
from fast_batcher._session.outcomes import CostEvaluator
from fast_batcher._session.session import OutcomeReader, ValueAccess
from fast_batcher._transport.channels import Reservation
from fast_batcher._transport.pickling import SerializedError, dumps
from fast_batcher.errors import BatcherError, UnsendableValueError
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from fast_batcher._transport.channels import Kind


class RowInput:
    """An input that lies in shared memory alone, or whose API process is being asked for it.

    Args:
        size: Its length in bytes.
        ask: Asks the API process to send the input once more, as a pickle; `finish` must follow.
    """

    def __init__(self, size: int, ask: Callable[["RowInput"], None]) -> None:
        self.nbytes = size
        self._ask = ask
        self._is_asked = False
        # Called when the input has come, or will not come.
        self._waiting: list[Callable[[], None]] = []

    def fetch(self, done: Callable[[], None]) -> None:
        """Ask for the input, and call `done` when it has come or will not come."""
        self._waiting.append(done)
        if not self._is_asked:
            self._is_asked = True
            self._ask(self)

    def finish(self) -> None:
        """Call the waiting callbacks."""
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()


class OpaquePickler:
    """Returns the pickles that API processes have made."""

    def pickle(self, values: list[Any], may_share: Callable[[], bool]) -> list[bytes]:
        """Return the pickle of each value."""
        return [self.dumps(value) for value in values]

    def dumps(self, value: Any) -> bytes:
        """Return the pickle of one value.

        Raises:
            UnsendableValueError: The API process has not sent it.
        """
        if type(value) is Pickled:
            return value.data
        if type(value) is RowInput:
            raise UnsendableValueError("its process is gone, or has not sent it again")
        return dumps(value)


class OpaqueReader(OutcomeReader):
    """Leaves outputs and errors as they are."""

    def read_item(self, item: bytes) -> Any:
        """Return an output, which its caller unpickles."""
        return Pickled(item)

    def read_error(self, error: SerializedError) -> Failure:
        """Return the failure for one request."""
        return Failure(OpaqueError(error))


class HostSender(BatchSender):
    """A `BatchSender` that asks API processes for inputs that it does not have."""

    def send(
        self, batch: Batch, contexts: Sequence[bytes] = ()
    ) -> list[tuple[Request, BatcherError]]:
        """Send a batch to its worker, as soon as all of its inputs are here."""
        requests = batch.requests
        if any(one.staged is None or one.staged.slab is None for one in requests):
            absent = [one.value for one in requests if type(one.value) is RowInput]
            if absent:
                self._send_later(batch, absent)
                return []
        return super().send(batch, contexts)

    def _send_later(self, batch: Batch, absent: list[RowInput]) -> None:
        """Keep the batch's position among the frames of its worker until the inputs are here."""
        for request in batch.requests:
            if request.staged is not None:
                request.staged.release()
        link = self._links[batch.worker]
        waiting = {id(one) for one in absent}
        send = functools.partial(self._fill, batch, link, link.reserve())
        for value in absent:
            value.fetch(functools.partial(_note_arrival, waiting, id(value), send))

    def _fill(self, batch: Batch, link: WorkerLink, reservation: Reservation) -> None:
        frames: list[tuple[Kind, int, bytes]] = []
        self._send_late(batch, lambda *frame: frames.append(frame))
        link.fill(reservation, frames)


def _note_arrival(waiting: set[int], arrived: int, send: Callable[[], None]) -> None:
    waiting.discard(arrived)
    if not waiting:
        send()


class _NoEvaluator(CostEvaluator):
    """API processes have called the user's functions."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings, name)
        self.is_needed = False


class HostAccess(ValueAccess):
    """Access to inputs and outputs that are bytes.

    Args:
        range_size: Bytes of shared memory for each API process; 0 for no shared memory.
    """

    reader = OpaqueReader()

    def __init__(self, range_size: int) -> None:
        self._range_size = range_size

    def open_memory(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        name: str,
    ) -> MemoryService:
        """Open memory for all ranges. The host writes nothing there."""
        return MemoryService(loop, MAX_RANGES * self._range_size, name)

    def make_sender(
        self, settings: Settings, memory: MemoryService, events: SenderEvents, name: str
    ) -> BatchSender:
        """Make a sender of pickles."""
        return HostSender(settings, memory, events, name, OpaquePickler())

    def make_evaluator(
        self, settings: Settings, name: str, methods: Sequence[Method]
    ) -> CostEvaluator:
        """Make an evaluator that calls nothing."""
        return _NoEvaluator(settings, name)
