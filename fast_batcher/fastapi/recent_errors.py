"""The latest error answers of this process, without their texts. API process, event loop's thread.

The exception handlers note each answer; the status page shows them. An error's text may hold input
of a user, so that only its type is kept, and the id that leads to the log.
"""

from collections import Counter, deque
from typing import NamedTuple

from starlette.requests import HTTPConnection

from fast_batcher._process import monotonic

# Answers that are kept for each code. A flood of one code (a full queue) must not hide another.
KEPT_PER_CODE = 5


class RecentError(NamedTuple):
    """An error answer."""

    # `time.monotonic` of the answer.
    at: float
    status: int
    # As in the answer's body.
    code: str
    error_id: str
    # Name of the error's class; of the raised class if the model raised.
    kind: str
    # Path of the route, with the names of its parameters instead of their values.
    route: str


class RecentErrors:
    """Error answers by code: how many there were, and the latest of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._latest: dict[str, deque[RecentError]] = {}

    def note(
        self, error: Exception, connection: HTTPConnection, status: int, code: str, error_id: str
    ) -> None:
        """Note an answer."""
        self.counts[code] += 1
        latest = self._latest.setdefault(code, deque(maxlen=KEPT_PER_CODE))
        route = getattr(connection.scope.get("route"), "path", "")
        kind = type(error).__name__
        latest.append(RecentError(monotonic(), status, code, error_id, kind, route))

    def newest_first(self) -> list[RecentError]:
        """Return the latest answers of every code."""
        return sorted([one for latest in self._latest.values() for one in latest], reverse=True)


# Of the process, as are the batchers' counts: an error does not know its app, and apps share
# batchers.
recent_errors = RecentErrors()
