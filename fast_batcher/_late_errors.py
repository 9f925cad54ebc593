"""Late errors: errors of batches that no caller gets, because the callers have left.

`LateErrors` is pure; `log_late_error` runs on the thread that has read or raised the error.
"""

import contextlib
import logging
from math import inf
from typing import Final

from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import can_be_shown

logger = logging.getLogger("fast_batcher")

# Seconds between two log records of one batcher: a model that always fails late must not fill the
# log, and an operator reads one record a minute.
LOG_INTERVAL: Final = 60.0


class LateErrors:
    """Count of late errors, and the decision which of them are logged."""

    def __init__(self) -> None:
        self.count = 0
        # The next error from this moment on is logged.
        self._log_at = -inf
        # Errors since the last logged one.
        self._omitted = 0

    def add(self, now: float) -> tuple[bool, int]:
        """Count an error; return whether it is to be logged, and the errors omitted before it."""
        self.count += 1
        omitted = self._omitted
        if now < self._log_at:
            self._omitted += 1
            return False, omitted
        self._log_at, self._omitted = now + LOG_INTERVAL, 0
        return True, omitted


def log_late_error(name: str, error: BaseException, omitted: int) -> None:
    """Log an error that no caller has got, with its traceback."""
    before = f" (and {omitted} errors before it)" if omitted else ""
    # An exception of a log handler must not end the loop or the thread.
    with contextlib.suppress(Exception):
        logger.warning(
            "%s: no caller got this error%s, because they had left; stats.late_errors counts such "
            "errors, and one a minute is logged: %s",
            name,
            before,
            one_line(error),
            exc_info=error if can_be_shown(error) else None,
        )
