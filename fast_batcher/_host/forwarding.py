"""Passes log records and events of the host to one API process. Host process."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import Context

from fast_batcher._host.tenant import Tenant
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.logs import pack_record
from fast_batcher._transport.pickling import dumps
from fast_batcher.observing import (
    BatchAnswered,
    CollectionPaused,
    Observer,
    RequestEnded,
    WorkerChanged,
)

# Finds an API process, None without one.
Find = Callable[[], Tenant | None]


class LogForwarder(logging.Handler):
    """Handler that passes records on; without an API process they go to stderr.

    Args:
        find_reader: Finds the API process that logs.
        loop: The event loop, on whose thread records are sent.
    """

    def __init__(self, find_reader: Find, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._find_reader = find_reader
        self._loop = loop
        self._thread = threading.get_ident()
        self._stderr = logging.StreamHandler()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; any thread."""
        if threading.get_ident() == self._thread:
            self._send(record)
        else:
            self._loop.call_soon_threadsafe(self._send, record, context=Context())

    def _send(self, record: logging.LogRecord) -> None:
        reader = self._find_reader()
        if reader is None:
            self._stderr.handle(record)
        else:
            reader.tell(Kind.LOG, pack_record(record))


class EventForwarder(Observer):
    """Observer that passes events on.

    Args:
        find_reporter: Finds the API process that reports.
    """

    def __init__(self, find_reporter: Find) -> None:
        self._find_reporter = find_reporter

    def batch_answered(self, event: BatchAnswered) -> None:
        """Pass on an answered batch."""
        self._send(event)

    def request_ended(self, event: RequestEnded) -> None:
        """Pass on the end of a request."""
        self._send(event)

    def worker_changed(self, event: WorkerChanged) -> None:
        """Pass on a change of a worker."""
        self._send(event)

    def _send(self, event: BatchAnswered | RequestEnded | WorkerChanged | CollectionPaused) -> None:
        reporter = self._find_reporter()
        if reporter is not None:
            reporter.tell(Kind.EVENT, dumps(event))
