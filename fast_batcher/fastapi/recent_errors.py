"""The error answers of this process, without their texts. API process, event loop's thread.

The exception handlers note each answer; the status page shows them. An error's text may hold input
of a user, so that only its type is kept, and the id that leads to the log.
"""

from collections import Counter
from typing import NamedTuple

from starlette.requests import HTTPConnection

from fast_batcher._process import monotonic

# Groups of equal answers that are kept for each code. Many routes with one code (a full queue)
# must not hide another code.
KEPT_PER_CODE = 5


class RecentError(NamedTuple):
    """Equal error answers: of one status, code, class and route."""

    # `time.monotonic` of the latest answer.
    at: float
    status: int
    # As in the answer's body.
    code: str
    # Of the latest answer.
    error_id: str
    # Name of the error's class; of the raised class if the model raised.
    kind: str
    # Path of the route, with the names of its parameters instead of their values.
    route: str
    # Answers since the start, or since the group was dropped for newer ones.
    answers: int


class RecentErrors:
    """Error answers by code: how many there were, and the latest groups of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        # By code; the group of the latest answer is the last one.
        self._latest: dict[str, dict[tuple[int, str, str], RecentError]] = {}

    def note(
        self, error: Exception, connection: HTTPConnection, status: int, code: str, error_id: str
    ) -> None:
        """Note an answer."""
        self.counts[code] += 1
        groups = self._latest.setdefault(code, {})
        route = getattr(connection.scope.get("route"), "path", "")
        kind = type(error).__name__
        before = groups.pop((status, kind, route), None)
        count = 1 if before is None else before.answers + 1
        found = RecentError(monotonic(), status, code, error_id, kind, route, count)
        groups[status, kind, route] = found
        if len(groups) > KEPT_PER_CODE:
            del groups[next(iter(groups))]

    def newest_first(self) -> list[RecentError]:
        """Return the latest groups of every code."""
        found = [one for groups in self._latest.values() for one in groups.values()]
        return sorted(found, reverse=True)


# Of the process, as are the batchers' counts: an error does not know its app, and apps share
# batchers.
recent_errors = RecentErrors()
