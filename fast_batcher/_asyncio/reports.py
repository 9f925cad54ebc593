"""Error messages and log lines of a session. API process, the event loop's thread."""

import contextlib
import functools
import logging
from collections.abc import Callable

from fast_batcher._core.values import Expire, ExpiryReason
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import BatcherError, DeadlineExceededError, NotReadyError
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")


class Reports:
    """Builds the error messages and log lines of one batcher.

    Args:
        name: The batcher's name.
        settings: The limits that messages name.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings

    def index(self, worker: int) -> int:
        """Return a worker's index, from 0; a replacement has its predecessor's index."""
        return worker % self._settings.num_workers

    def expiry_error(self, action: Expire) -> BatcherError:
        """Make the error for the caller of an expired request."""
        if action.rejection is not None:
            return action.rejection.to_error()
        named = action.request.timeout
        limit = f"its timeout of {self._settings.timeout if named is None else named} seconds"
        if action.reason is ExpiryReason.NOT_READY:
            return NotReadyError(f"no worker was ready for the call within {limit}")
        if action.reason is ExpiryReason.WAITING:
            return DeadlineExceededError(f"the request was still waiting after {limit}")
        if action.reason is ExpiryReason.RUNNING:
            return DeadlineExceededError(f"the model had not answered within {limit}")
        return DeadlineExceededError(
            f"the batch ran longer than infer_timeout={self._settings.infer_timeout} seconds"
        )

    def log_stall(self, worker: int) -> None:
        """Log that a worker computes for longer than any caller waits."""
        limit = self._settings.infer_timeout
        logger.warning(
            "%s: worker %d is not ready: it has computed one batch for timeout=%s seconds, and no "
            "caller waits for it any more; it gets no other batch before it answers, and is "
            "replaced %s",
            self._name,
            self.index(worker),
            self._settings.timeout,
            "by infer_timeout alone, which is not set"
            if limit is None
            else f"after infer_timeout={limit} seconds",
        )

    def log_infer_timeout(self, worker: int) -> None:
        """Log that a worker is replaced because its batch takes too long."""
        limit = self._settings.infer_timeout
        reason = f"its batch took longer than infer_timeout={limit} seconds"
        self._log_replacement(logging.WARNING, worker, reason)

    def log_fatal_error(self, worker: int) -> None:
        """Log that a worker is replaced because its device is lost."""
        self._log_replacement(logging.ERROR, worker, "its device cannot be used any more")

    def _log_replacement(self, level: int, worker: int, reason: str) -> None:
        logger.log(level, "%s: worker %d is replaced: %s", self._name, self.index(worker), reason)

    def internal_error(self, error: Exception) -> Callable[[], BatcherError]:
        """Log an internal error, and return a function that makes an error for each caller."""
        # An exception of a log handler must not end the loop.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: an internal error; the calls that it hits fail, and the batcher goes on",
                self._name,
                exc_info=error,
            )
        return functools.partial(
            BatcherError,
            f"{self._name}: an internal error of fast_batcher ({one_line(error)}); its traceback "
            "is in the log. Please report it",
        )
