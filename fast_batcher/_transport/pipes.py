"""The two pipes between the parent and one worker, one each way.

Pipes, not a socket pair: a message there and back costs half as much. See docs/decisions/0009.
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

# Where one side reads, and where it writes.
Ends = tuple["Connection[object, object]", "Connection[object, object]"]

# Bytes that a pipe holds. With the usual 64 KiB a batch of large inputs takes one turn of the loop
# per 64 KiB. This is the most that Linux grants every user.
PIPE_SIZE = 1024 * 1024


def open_pipes(context: BaseContext) -> tuple[Ends, Ends]:
    """Open two pipes: the ends of one side, and those of the other.

    Args:
        context: Of `multiprocessing`; its connections can be passed to a process that it starts.
    """
    occupy_stdio()
    first, into_first = context.Pipe(duplex=False)
    second, into_second = context.Pipe(duplex=False)
    if sys.platform == "linux":
        import fcntl

        for end in (first, second):
            # A user has 64 MiB for all pipes together; beyond that they stay at 64 KiB.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    for end in (first, into_first, second, into_second):
        # While a child that the app forks has a copy, a worker never reads an end of file. Only the
        # descriptor is closed: the child shares the loop's selector with the parent, which goes on.
        at_fork(end, in_child=methodcaller("close"))
    return (first, into_second), (second, into_first)
