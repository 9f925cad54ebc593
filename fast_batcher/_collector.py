"""Tuning of the garbage collector in a process that serves requests. API process and worker.

A full collection visits every object of the process: the modules, the app, the model. With torch
imported that takes tens of milliseconds, during which no request is served. These objects live as
long as the process serves, so visiting them frees nothing. `gc.freeze` excludes them from all later
collections; a higher threshold makes collections of young objects rarer. Any thread.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Net allocations between two collections of the youngest generation. With the default of 700,
# waiting requests are visited by many collections, and are promoted to the oldest generation.
# Measured over HTTP with a frozen app, torch imported: with 256 waiting requests, 700
# costs 18 us of CPU time per request, 5,000 costs 11, and 20,000 or more cost 0.1 or nothing. The
# longest pause with 1,000 is 28 ms with 700, 3 ms with 20,000, 7 ms with 50,000.
YOUNG_OBJECTS = 20_000
# The defaults of the supported Python versions: other thresholds were set by the app.
_DEFAULT_THRESHOLDS = ((700, 10, 10), (2000, 10, 0), (2000, 10, 10))


class _Tuning:
    """Changes to the collector of this process, and the number of lifespans that need them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted_by = 0
        self.has_frozen = False
        # The thresholds before they were changed, None if they were not.
        self.thresholds: tuple[int, int, int] | None = None


_tuning = _Tuning()


def freeze_for_good() -> None:
    """Collect once, and exclude all live objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude live objects from collections, and collect less often, until the block ends.

    Blocks may overlap, also in several threads: the first that begins changes the collector, the
    last that ends restores it. Each block freezes the objects that are alive at its start.

    An app that has called `gc.freeze` or `gc.set_threshold` itself keeps its settings.
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
    # Thresholds that the app has set meanwhile stay.
    if before is not None and gc.get_threshold() == (YOUNG_OBJECTS, *before[1:]):
        gc.set_threshold(*before)
    _tuning.has_frozen, _tuning.thresholds = False, None
