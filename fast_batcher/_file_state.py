"""States of files and folders, which show whether they have changed. Runs in every process."""

import contextlib
import os
import stat
from collections.abc import Iterator

# Time of the last change in nanoseconds and length in bytes, of a file or of the files of a folder.
FileState = tuple[tuple[int, int], ...]

# Files and subfolders of one folder that are looked at: more than a model has, and few enough to be
# looked at on an event loop, at 2 us each.
MOST_FILES = 1000


def read_state(path: str) -> FileState | None:
    """Return the state of a file or a folder with its subfolders; None if there is neither."""
    with contextlib.suppress(OSError, ValueError):  # it is gone; or the path has a null byte
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return ((status.st_mtime_ns, status.st_size),)
        if stat.S_ISDIR(status.st_mode):
            return tuple(_read_folder(path))
    return None


def _read_folder(path: str) -> Iterator[tuple[int, int]]:
    """Read the states of a folder's files, in the order of their names."""
    count = 0
    for folder, subfolders, names in os.walk(path):
        subfolders.sort()
        # A folder counts, too: there are trees without files.
        count += 1
        if count > MOST_FILES:
            return
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                return
            with contextlib.suppress(OSError):  # it is gone, or a link to nothing
                status = os.stat(os.path.join(folder, name))
                yield status.st_mtime_ns, status.st_size
