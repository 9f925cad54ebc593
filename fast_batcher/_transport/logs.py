"""Log records of a worker, on their way to the loggers of its parent. Both sides.

    worker  LogSettings: any thread; never waits for room: a record that finds none is lost, and
            counted
    parent  LogReceiver: the event loop's thread, a few records in each turn

The text of a record is JSON, so that the parent unpickles no object of the model.
"""

import json
import logging
import socket
import warnings
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fast_batcher._transport.progress import WorkerProgress

if TYPE_CHECKING:
    # A worker, which loads this module, has no event loop.
    from asyncio import AbstractEventLoop

# Longest datagram in bytes, and letters that are left of each of the four texts of a longer record.
# JSON takes at most 6 bytes for a letter.
MAX_BYTES = 65536
MAX_LETTERS = 2500
# Room for records that the parent has not read, as far as the system allows it: Linux grants
# about 400 KiB by default.
ROOM = 1024 * 1024

_formatter = logging.Formatter()


def open_log_sockets() -> tuple[socket.socket, socket.socket]:
    """Open the two ends: the one to receive from, and the one to send into."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    receiver.setblocking(False)
    return receiver, sender


def pack_record(record: logging.LogRecord) -> bytes:
    """Pack a record, its message formatted; attributes that JSON does not know become texts.

    One whose text cannot be made becomes the name of its type.
    """
    fields = dict(vars(record), msg=record.getMessage(), args=None, exc_info=None)
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _formatter.formatException(record.exc_info)
    try:
        packed = _encode(fields)
    except Exception:  # noqa: BLE001  the message counts, whatever the model has attached to it
        packed = _encode_each(fields)
    return packed if len(packed) <= MAX_BYTES else _pack_shortened(record, fields)


def _pack_shortened(record: logging.LogRecord, fields: dict[str, Any]) -> bytes:
    """Pack the beginning of the message and the end of the traceback, without other attributes."""
    name, path = record.name[:MAX_LETTERS], record.pathname[:MAX_LETTERS]
    message, traceback = fields["msg"][:MAX_LETTERS], fields["exc_text"]
    short = logging.LogRecord(
        name, record.levelno, path, record.lineno, f"{message} [shortened]", None, None
    )
    short.created = record.created
    short.exc_text = traceback and traceback[-MAX_LETTERS:]
    return _encode(vars(short))


def _encode(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields, default=str, skipkeys=True, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _encode_each(fields: dict[str, Any]) -> bytes:
    """Encode the attributes that can be, and the types of the others."""
    shown = dict(fields)
    for name, value in fields.items():
        try:
            _encode({name: value})
        except Exception:  # noqa: BLE001  it has a cycle, or its `__str__` raises
            shown[name] = f"<{type(value).__qualname__}>"
    return _encode(shown)


def unpack_record(packed: bytes) -> logging.LogRecord:
    """Return the record, with the worker's time, process and thread."""
    return logging.makeLogRecord(json.loads(packed))


@dataclass(frozen=True)
class LogSettings:
    """Logging settings of the parent for a worker; made there, when the worker starts."""

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
        """Log to the parent from now on, in a worker process.

        The main module and the model's may configure logging while they are imported, as in the
        parent: the parent's handlers get their records, and those of the worker would be others.
        """
        root = logging.getLogger()
        if not any(isinstance(one, RecordSender) for one in root.handlers):
            root.handlers[:] = [RecordSender(self.sender, progress)]
        root.setLevel(self.root_level)
        logging.getLogger("fast_batcher").setLevel(self.library_level)
        logging.captureWarnings(self.captures_warnings)


class RecordSender(logging.Handler):
    """Handler that sends records without waiting."""

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
        except OSError:  # there is no room, or the parent is gone
            self._progress.lost_records += 1


logger = logging.getLogger("fast_batcher")

# Records per turn of the loop: handlers may take 50 us for each.
RECORDS_PER_TURN = 20


class LogReceiver:
    """Receives the records of one worker."""

    def __init__(
        self, receiver: socket.socket, progress: WorkerProgress, attributes: dict[str, object]
    ) -> None:
        self._receiver = receiver
        self._progress = progress
        self._attributes = attributes
        self._reported = 0
        self._loop: AbstractEventLoop | None = None

    def attach(self, loop: "AbstractEventLoop") -> None:
        """Receive on this event loop."""
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
        """Hand over one record; return False if no record has arrived."""
        try:
            packed = self._receiver.recv(MAX_BYTES)
        except OSError:
            self._report_lost()
            return False
        record = unpack_record(packed)
        for name, value in self._attributes.items():  # the model's own attributes stay
            vars(record).setdefault(name, value)
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
