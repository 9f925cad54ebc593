"""`JobThread`: a thread that runs blocking jobs, one after the other. Parent process.

It keeps two kinds of jobs off the event loop: copies of large values, and starts of worker
processes, which take milliseconds.
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
        # Outcomes that the loop has not taken yet. They are kept here, so that an outcome that
        # comes while a loop is being closed reaches the next loop.
        self._outcomes: deque[tuple[Done, BaseException | None]] = deque()
        self._thread: threading.Thread | None = None
        # Held while a job runs.
        self._lock = threading.Lock()
        self._is_held = False

    def run(self, job: Job, done: Done) -> None:
        """Call `job` on the thread, and then `done` on the event loop with its error or None.

        Jobs run one after the other. If the system cannot start a thread, the job runs now.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                Context().run(thread.start)  # a free-threaded Python copies the context to it
            except RuntimeError:  # the system cannot start a thread
                self._do(job, done)
                return
            self._thread = thread
        self._jobs.put((job, done))

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `done` on another event loop from now on; the previous loop is closed."""
        self._loop = loop
        self.take_outcomes()

    def take_outcomes(self) -> None:
        """Call `done` of the finished jobs. Event loop's thread."""
        while self._outcomes:
            done, error = self._outcomes.popleft()
            done(error)

    def hold(self) -> None:
        """Start no further job, and wait for the end of the current one."""
        # Before the lock is taken: the thread may take it again for its next job.
        self._is_held = True
        with self._lock:
            pass

    def stop(self) -> None:
        """End the thread after the current job, and drop all other jobs and outcomes."""
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
            del job, done  # else they would live until the next job

    def _do(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:  # noqa: BLE001  `done` gets any error
            # Without its frames, which hold the pipes of a failed start, for example.
            error = raised.with_traceback(None)
        self._outcomes.append((done, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed; `rebind` takes the outcome
            self._loop.call_soon_threadsafe(self.take_outcomes, context=Context())
