"""Descriptor hygiene: standard streams stay occupied, and workers inherit only what they need."""

import os


def occupy_stdio() -> None:
    """Open /dev/null at each free descriptor from 0 to 2.

    Call it before a pipe is opened: in a program that was started without standard streams the pipe
    would get one of these numbers, and output of native code to 1 and 2 would become part of a
    request.

    The descriptors stay open, because a later pipe could get a closed number. They are
    close-on-exec, so that processes started by the program do not inherit them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is free, and the next file gets the lowest free number
            fd = os.open(os.devnull, os.O_RDWR)
            if fd > 2:  # another thread was faster
                os.close(fd)


class PassedDescriptor:
    """Descriptor that is passed to a worker, where it has the number it has in the parent.

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
