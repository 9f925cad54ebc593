"""Which numbers the descriptors of ours may have, and which processes get them."""

import os


def occupy_stdio() -> None:
    """Open /dev/null at each descriptor from 0 to 2 that is free.

    Called before a file of ours is opened, which would get such a number in a program that was
    started without standard streams. Native code prints to 1 and 2 without asking what is there, so
    what it prints would become part of a request.

    The descriptors stay open, for another file of ours could get the number of a closed one. They
    are close-on-exec: processes that the program starts get what they would have got without us.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is free, and the next file gets the lowest free number
            fd = os.open(os.devnull, os.O_RDWR)
            if fd > 2:  # another thread was faster
                os.close(fd)


class PassedDescriptor:
    """A descriptor on its way to a worker, where it has the number that it has in the parent.

    Args:
        fd: The number.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """The descriptor, which the worker owns from now on. Called in the worker.

        Programs that the model starts do not get it.
        """
        os.set_inheritable(self._fd, False)
        return self._fd
