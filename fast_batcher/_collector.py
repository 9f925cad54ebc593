"""Freezing of live objects in a process that serves requests. API process and worker. Any thread.

A full collection visits every object of the process: the modules, the app, the model. With torch
imported that takes tens of milliseconds, during which no request is served. These objects live as
long as the process serves, so visiting them frees nothing. `gc.freeze` excludes them from all later
collections.

The thresholds stay Python's own. A higher one saves some CPU time per request, and lets an app that
leaves garbage in reference cycles hold it for longer. Source: `benchmarks/garbage_collection.py`.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Freeze:
    """Whether this process has frozen its objects, and the number of blocks that need that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted_by = 0
        # False if the app had frozen objects before.
        self.is_ours = False


_freeze = _Freeze()


def freeze_for_good() -> None:
    """Collect once, and exclude all live objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude live objects from collections until the block ends.

    Blocks may overlap, also in several threads: each block freezes the objects that are alive at
    its start, and the last that ends unfreezes all. An app that has called `gc.freeze` itself keeps
    its frozen objects.
    """
    with _freeze.lock:
        if not _freeze.wanted_by:
            _freeze.is_ours = not gc.get_freeze_count()
        _freeze.wanted_by += 1
        if _freeze.is_ours:
            freeze_for_good()
    try:
        yield
    finally:
        with _freeze.lock:
            _freeze.wanted_by -= 1
            if not _freeze.wanted_by and _freeze.is_ours:
                gc.unfreeze()
