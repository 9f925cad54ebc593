"""Log records on their way from a worker to the API process: one datagram each.

The worker never waits for room: a record that finds none is lost, and counted. The text of a record
is JSON, so that the API process unpickles no object of the model.
"""

import json
import logging
import socket
from typing import Any

# Longest datagram in bytes, and letters that are left of each of the four texts of a longer record.
# JSON takes at most 6 bytes for a letter.
MAX_BYTES = 65536
MAX_LETTERS = 2500
# Room for records that the API process has not read, as far as the system allows it: Linux grants
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
    """Pack a record, its message formatted; attributes that JSON does not know become texts."""
    fields = dict(vars(record), msg=record.getMessage(), args=None, exc_info=None)
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _formatter.formatException(record.exc_info)
    packed = _encode(fields)
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


def unpack_record(packed: bytes) -> logging.LogRecord:
    """Return the record, with the worker's time, process and thread."""
    return logging.makeLogRecord(json.loads(packed))
