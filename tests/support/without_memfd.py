"""Runs a module like `python -m`, in a process that the kernel refuses `memfd_create`.

As the seccomp profile of a container does: a filter that lasts, also in every child.
"""

import ctypes
import errno
import platform
import runpy
import struct
import sys

# Numbers of the system call. Source: asm/unistd.h of the architectures.
NUMBERS = {"x86_64": 319, "aarch64": 279}
# linux/prctl.h, linux/seccomp.h, linux/bpf_common.h.
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
REFUSE, ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse() -> None:
    """Refuse the call from now on; raise where there are no such filters."""
    instructions = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (LOAD_WORD, 0, 0, 0),  # the number of the call
            (JUMP_IF_EQUAL, 0, 1, NUMBERS[platform.machine()]),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        )
    )
    library = ctypes.CDLL(None, use_errno=True)
    program = Filter(4, instructions)
    if (
        library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        or library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)) != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
