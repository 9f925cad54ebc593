"""Sends the log records of a worker to the API process. Worker process, any thread of the model."""

import logging
import socket
import warnings
from dataclasses import dataclass

from fast_batcher._transport.log_records import pack_record
from fast_batcher._transport.progress import WorkerProgress


@dataclass(frozen=True)
class LogSettings:
    """Logging settings of the API process for a worker; made there, when the worker starts."""

    # The worker's end of the sockets.
    sender: socket.socket
    # Levels of the root logger, and the effective one of the library's.
    root_level: int
    library_level: int
    # Whether `logging.captureWarnings(True)` was called.
    captures_warnings: bool

    @classmethod
    def of_this_process(cls, sender: socket.socket) -> "LogSettings":
        """Read the settings of this process."""
        return cls(
            sender,
            logging.getLogger().level,
            logging.getLogger("fast_batcher").getEffectiveLevel(),
            # `captureWarnings` puts its own function there.
            warnings.showwarning.__module__ == "logging",
        )

    def apply(self, progress: WorkerProgress) -> None:
        """Log to the API process from now on, in a worker process."""
        root = logging.getLogger()
        root.addHandler(RecordSender(self.sender, progress))
        root.setLevel(self.root_level)
        logging.getLogger("fast_batcher").setLevel(self.library_level)
        logging.captureWarnings(self.captures_warnings)


class RecordSender(logging.Handler):
    """Handler that sends records without waiting.

    Args:
        sender: The worker's end of the sockets.
        progress: Memory in which the lost records are counted.
    """

    def __init__(self, sender: socket.socket, progress: WorkerProgress) -> None:
        super().__init__()
        sender.setblocking(False)
        self._sender = sender
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; count it as lost if there is no room."""
        try:
            packed = pack_record(record)
        except Exception:  # noqa: BLE001  as every handler does
            self.handleError(record)
            return
        try:
            self._sender.send(packed)
        except OSError:  # there is no room, or the API process is gone
            self._progress.lost_records += 1
