"""The monotonic clock of deadlines, in seconds. API process, any thread.

Test tools that freeze time (freezegun, for example) replace `time.monotonic` in every module that
imports it, and restore it later. A request that arrives in between would have a meaningless
deadline, and the scheduler learns from arrivals on a clock that must never go back. These tools do
not replace `time.clock_gettime(CLOCK_MONOTONIC)`, which takes 0.04 us more.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Final

monotonic: Callable[[], float]
if sys.platform == "win32":  # has no `clock_gettime`, and `DynBatcher` does not run there
    monotonic = time.monotonic
else:
    monotonic = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)

# Seconds for which the user's code may block the event loop before a warning is logged: users
# notice a tenth of a second.
SLOW: Final = 0.1
