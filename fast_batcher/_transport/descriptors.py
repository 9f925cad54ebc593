"""Which numbers our descriptors may have, and which processes get them."""

import os


def occupy_stdio() -> None:
    """Open /dev/null at each descriptor from 0 to 2 that is free.

    To be called before a pipe is opened: in a program that was started without standard streams the
    pipe would get one of these numbers, and what native code prints to 1 and 2 would become part of
    a request.

    The descriptors stay open, because another pipe could get the number of a closed one. They are
    close-on-exec: processes that the program starts get what they would get without this library.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is free, and the next file gets the lowest free number
            fd = os.open(os.devnull, os.O_RDWR)
            if fd > 2:  # another thread was faster
                os.close(fd)


class PassedDescriptor:
    """A descriptor that is passed to a worker under the number that it has in the parent.

    Args:
        fd: The number.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """Return the descriptor, which the worker owns from now on. Called in the worker.

        Programs that the model starts do not inherit it.
        """
        os.set_inheritable(self._fd, False)
        return self._fd
