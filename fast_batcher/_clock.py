"""The clock that deadlines are told by, in seconds. API process, any thread.

Test tools that freeze time replace `time.monotonic` in every module that has it, and set it back
when they are done. A request that arrives in between would have a deadline in another age, and what
is learned from arrivals rests on a clock that never goes back. They leave `time.clock_gettime` with
this clock alone; it takes 0.04 us more.
"""

import functools
import sys
import time
from collections.abc import Callable

monotonic: Callable[[], float]
if sys.platform == "win32":  # has no other, and no worker processes of ours
    monotonic = time.monotonic
else:
    monotonic = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)
