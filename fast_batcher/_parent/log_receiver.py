"""Hands the log records of one worker to the loggers of the API process.

Runs on the event loop's thread, a few records in each turn. Records that the worker could not send
are reported as a number.
"""

import logging
import socket
from asyncio import AbstractEventLoop
from contextvars import Context

from fast_batcher._transport.log_records import MAX_BYTES, unpack_record
from fast_batcher._transport.progress import WorkerProgress

logger = logging.getLogger("fast_batcher")

# Records per turn of the loop: handlers may take 50 us for each.
RECORDS_PER_TURN = 20


class LogReceiver:
    """Receives the records of one worker.

    Args:
        receiver: The end of the sockets to receive from, which this object owns.
        progress: Memory in which the worker counts the lost records.
        attributes: Attributes that every record gets.
    """

    def __init__(
        self, receiver: socket.socket, progress: WorkerProgress, attributes: dict[str, object]
    ) -> None:
        self._receiver = receiver
        self._progress = progress
        self._attributes = attributes
        self._reported = 0
        self._loop: AbstractEventLoop | None = None

    def attach(self, loop: AbstractEventLoop) -> None:
        """Receive on this event loop; the previous loop, if any, is closed."""
        self._loop = loop
        Context().run(loop.add_reader, self._receiver.fileno(), self._receive_some)

    def close(self) -> None:
        """Hand over what is left, and close the socket. The worker is dead."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._receiver.fileno())
        while self._receive_one():
            pass
        self._receiver.close()

    def _receive_some(self) -> None:
        for _ in range(RECORDS_PER_TURN):
            if not self._receive_one():
                return

    def _receive_one(self) -> bool:
        """Hand over one record; return False if there is none."""
        try:
            packed = self._receiver.recv(MAX_BYTES)
        except OSError:
            self._report_lost()
            return False
        record = unpack_record(packed)
        vars(record).update(self._attributes)
        target = logging.getLogger(record.name)
        if target.isEnabledFor(record.levelno):
            target.handle(record)
        return True

    def _report_lost(self) -> None:
        # When nothing is left to read, the worker has room again.
        lost = self._progress.lost_records
        if lost > self._reported:
            logger.warning(
                "%s: %d log records of worker %s (pid %s) are lost: it logs faster than the app "
                "reads",
                *(self._attributes["model"], lost - self._reported),
                *(self._attributes["worker"], self._attributes["worker_pid"]),
                extra=self._attributes,
            )
            self._reported = lost
