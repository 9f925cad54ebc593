"""Log record of a late error. Runs on the thread that has read or raised the error."""

import contextlib
import logging

from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import can_be_shown

logger = logging.getLogger("fast_batcher")


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
