"""The files of the modules that a worker has imported for its model. Worker process.

A host process compares them with the disk before it takes another server process: see
`_host/server.py`.
"""

import os
import site
import sys
import sysconfig

from fast_batcher._file_state import FileState, read_state


def read_module_files() -> dict[str, FileState]:
    """Return the states of all imported files but those of Python and of installed packages."""
    installed = tuple(f"{path}{os.sep}" for path in _list_installed())
    found = {}
    # `__dict__`: an attribute of a lazy module may import it.
    for module in [*sys.modules.values()]:
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not file.startswith(installed):
            state = read_state(file)
            if state is not None:
                found[os.path.abspath(file)] = state
    return found


def _list_installed() -> set[str]:
    """Return the directories of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return paths | {os.path.realpath(path) for path in paths}
