"""The two pipes between the parent and one worker, one in each direction.

Pipes, not a socket pair: a round trip costs half as much. See docs/decisions/0009.
"""

import contextlib
import sys
from multiprocessing.context import BaseContext
from operator import methodcaller
from typing import TYPE_CHECKING

from fast_batcher._fork import at_fork
from fast_batcher._transport.descriptors import occupy_stdio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# The read end and the write end of one side.
Ends = tuple["Connection[object, object]", "Connection[object, object]"]

# Capacity of a pipe in bytes, the most that Linux grants every user. With the default of 64 KiB a
# batch of large inputs takes one turn of the loop per 64 KiB.
PIPE_SIZE = 1024 * 1024


def open_pipes(context: BaseContext) -> tuple[Ends, Ends]:
    """Open two pipes, and return the ends of each side.

    Args:
        context: A `multiprocessing` context; its connections can be passed to its child processes.
    """
    occupy_stdio()
    first, into_first = context.Pipe(duplex=False)
    second, into_second = context.Pipe(duplex=False)
    if sys.platform == "linux":
        import fcntl

        for end in (first, second):
            # Linux limits all pipes of a user to 64 MiB; further pipes stay at 64 KiB.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    for end in (first, into_first, second, into_second):
        # While a forked child of the app has a copy of an end, a worker reads no end of file. The
        # child closes only the descriptor: it shares the loop's selector with the parent.
        at_fork(end, in_child=methodcaller("close"))
    return (first, into_second), (second, into_first)
