"""What a call may name besides its input: checked values of `timeout` and `priority`."""

import math
from typing import Any

from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import MAX_PRIORITY, MAX_SECONDS


def checked_timeout(timeout: Any) -> float:
    """The timeout of a call in seconds.

    Raises:
        ConfigurationError: It is no number above 0, at most a year, or `math.inf`.
    """
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not (0 < timeout <= MAX_SECONDS or timeout == math.inf):
        raise ConfigurationError(
            f"timeout={timeout!r:.100}: give more than 0 seconds and at most a year, or math.inf "
            "for no limit"
        )
    return float(timeout)


def checked_priority(priority: Any) -> int:
    """The priority of a call.

    Raises:
        ConfigurationError: It is no whole number from -100 to 100.
    """
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ConfigurationError(
            f"priority={priority!r:.100}: give a whole number from {-MAX_PRIORITY} to "
            f"{MAX_PRIORITY}"
        )
    return int(priority)
