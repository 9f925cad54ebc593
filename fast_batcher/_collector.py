"""The garbage collector of a process that serves requests. API process and worker, any thread.

A full collection visits every object of the process: the modules, the app, the model. With torch
imported that takes tens of milliseconds, and no request is served meanwhile. These objects live as
long as the process serves, so visiting them finds nothing. `freeze` moves them to where collections
do not look, and makes collections of young objects rarer.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that are allocated and not freed between two collections of the youngest generation. With
# the default of 700, requests that wait are collected again and again, and reach the oldest
# generation. Measured over HTTP with a frozen app, torch imported: with 256 requests that wait, 700
# costs 18 us of CPU time per request, 5,000 costs 11, and 20,000 or more cost 0.1 or nothing. The
# longest pause with 1,000 is 28 ms with 700, 3 ms with 20,000, 7 ms with 50,000.
YOUNG_OBJECTS = 20_000
# What the supported versions of Python start with: other thresholds were set by the app.
_DEFAULT_THRESHOLDS = ((700, 10, 10), (2000, 10, 0), (2000, 10, 10))


class _Tuning:
    """What this process has changed, and how many lifespans want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted_by = 0
        self.has_frozen = False
        # The thresholds before they were changed, None if they were not.
        self.thresholds: tuple[int, int, int] | None = None


_tuning = _Tuning()


def freeze_for_good() -> None:
    """Collect once, and leave what is alive now out of all later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Freeze what is alive now, and collect young objects less often, until the block ends.

    Blocks may overlap, also in several threads: the first one that begins changes the collector,
    the last one that ends changes it back. What each block finds alive is frozen too.

    An app that has frozen objects itself, or has set thresholds, keeps what it has set.
    """
    with _tuning.lock:
        if not _tuning.wanted_by:
            _tuning.has_frozen = not gc.get_freeze_count()
            if gc.get_threshold() in _DEFAULT_THRESHOLDS:
                _tuning.thresholds = gc.get_threshold()
                gc.set_threshold(YOUNG_OBJECTS, *_tuning.thresholds[1:])
        _tuning.wanted_by += 1
        if _tuning.has_frozen:
            freeze_for_good()
    try:
        yield
    finally:
        with _tuning.lock:
            _tuning.wanted_by -= 1
            if not _tuning.wanted_by:
                _undo()


def _undo() -> None:
    if _tuning.has_frozen:
        gc.unfreeze()
    before = _tuning.thresholds
    # The app may have set others meanwhile, which it keeps.
    if before is not None and gc.get_threshold() == (YOUNG_OBJECTS, *before[1:]):
        gc.set_threshold(*before)
    _tuning.has_frozen, _tuning.thresholds = False, None
