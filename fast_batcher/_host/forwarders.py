"""Forwarding of the host's log records and events to API processes.

Host process, on the event loop's thread; log records come from any thread. Each goes to one API
process: a log record to one that reads, an event to the reporter. Batches with contexts of callers
are followed by the process of one of these, too.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import replace
from typing import Any

from fast_batcher._host import messages
from fast_batcher._host.tenant import CallerContext, Tenant
from fast_batcher._observers import PickledContexts
from fast_batcher._transport.logs import pack_record
from fast_batcher.observing import (
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    Observer,
    RequestEnded,
    WorkerChanged,
)

# Finds an API process, None without one.
Find = Callable[[], Tenant | None]


class LogForwarder(logging.Handler):
    """Handler that passes records on; without an API process they go to stderr."""

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
            return
        try:
            reader.tell_news(messages.Log(pack_record(record)))
        except Exception:  # noqa: BLE001  as handlers of Python do: the text may not fit its values
            self.handleError(record)


class EventForwarder(Observer):
    """Observer that passes events on: batches of followed callers to one caller's process, too."""

    needs_context = True

    def __init__(self, find_reporter: Find) -> None:
        self._find_reporter = find_reporter

    def _report(
        self, event: BatchAnswered | RequestEnded | WorkerChanged, *, follow: bool | None = None
    ) -> None:
        reporter = self._find_reporter()
        if reporter is not None:
            reporter.tell_news(messages.Told(event, follow))

    def worker_changed(self, event: WorkerChanged) -> None:
        """Report a change of a worker."""
        self._report(event)

    def request_ended(self, event: RequestEnded) -> None:
        """Report the end of a request."""
        self._report(replace(event, context=None))

    def batch_dispatched(self, event: BatchDispatched) -> AbstractContextManager[Any] | None:
        """Return the context in which the worker computes the batch."""
        chosen = _choose_context(event)
        return None if chosen is None else PickledContexts(chosen.managers)

    def batch_answered(self, event: BatchAnswered) -> None:
        """Report an answered batch."""
        is_followed = event.dispatched is not None and self._tell_follower(event, event.dispatched)
        requests = [
            request if request.context is None else replace(request, context=None)
            for request in event.requests
        ]
        event = replace(event, requests=requests, dispatched=None)
        self._report(event, follow=False if is_followed else None)

    def batch_lost(self, event: BatchLost) -> None:
        """Tell the process that follows it of a batch without an answer."""
        self._tell_follower(event, event.dispatched)

    def _tell_follower(self, event: BatchAnswered | BatchLost, dispatched: BatchDispatched) -> bool:
        """Tell the process of the first followed caller; return whether there is one."""
        chosen = _choose_context(dispatched)
        if chosen is None or not chosen.is_followed:
            return False
        chosen.tenant.tell_soon(messages.Followed(dispatched, event))
        return True


def _choose_context(event: BatchDispatched) -> CallerContext | None:
    """Return the context of the first followed caller, or else of the first with a context."""
    contexts: Sequence[Any] = event.contexts
    present = [context for context in contexts if context is not None]
    return min(present, key=lambda context: not context.is_followed, default=None)
