"""A thread that does one job after the other, for what would block the event loop. Parent process.

Two things are not for the event loop: copying what is large, and starting worker processes, which
takes milliseconds.
"""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context

Job = Callable[[], None]
# Called with the error of the job, or None.
Done = Callable[[BaseException | None], None]


class JobThread:
    """Runs jobs on another thread, and tells the event loop when they are done.

    The thread is started with the first job, and lives until `stop`.

    Args:
        loop: The event loop on which `done` is called.
        name: The thread's name.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        # Outcomes that the loop has not taken yet. They are kept here, so that one that comes
        # while a loop is being closed is there for the next.
        self._outcomes: deque[tuple[Done, BaseException | None]] = deque()
        self._thread: threading.Thread | None = None
        # Held while a job is done.
        self._lock = threading.Lock()
        self._is_held = False

    def run(self, job: Job, done: Done) -> None:
        """Call `job` on the thread, and then `done` on the event loop with its error or None.

        Jobs are done one after the other. If the system has no thread for us, the job is done now.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                Context().run(thread.start)  # free-threaded Python passes it on
            except RuntimeError:  # better late than never
                self._do(job, done)
                return
            self._thread = thread
        self._jobs.put((job, done))

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell another event loop from now on; the one before is closed."""
        self._loop = loop
        self.take_outcomes()

    def take_outcomes(self) -> None:
        """Call `done` of the jobs that have been done. Event loop's thread."""
        while self._outcomes:
            done, error = self._outcomes.popleft()
            done(error)

    def hold(self) -> None:
        """Forbid further jobs; returns when the current one is over."""
        # Ahead of the lock, which the thread may take again for its next job.
        self._is_held = True
        with self._lock:
            pass

    def stop(self) -> None:
        """End the thread after the current job, and forget all others and their outcomes."""
        self.hold()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._outcomes.clear()

    def _work(self) -> None:
        for job, done in iter(self._jobs.get, None):
            with self._lock:
                if not self._is_held:
                    self._do(job, done)
            del job, done  # nothing keeps them while the next one is waited for

    def _do(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:  # noqa: BLE001  the event loop is told, whatever it is
            # Without its frames, which hold the pipes of a failed start, for example.
            error = raised.with_traceback(None)
        self._outcomes.append((done, error))
        with contextlib.suppress(RuntimeError):  # that loop is closed; `rebind` takes it
            self._loop.call_soon_threadsafe(self.take_outcomes, context=Context())
