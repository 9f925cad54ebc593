"""Copying much, faster than one core does. The parent's copying thread, and one that helps it."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable

from fast_batcher._shared_memory.memcpy import Move, move

# Bytes from which on two threads copy: one core does not reach what the memory can do. To wake the
# other takes some tens of microseconds, and to copy this much alone 600.
LEAST_HELPED = 4 * 1024 * 1024
# Of what is copied by two. More would divide it more evenly, but after each a thread has to have
# the interpreter's lock again, for which it waits up to 5 ms where another thread computes.
PIECES = 4

# Calls this on another thread, once or never.
RunBeside = Callable[[Callable[[], None]], None]


class ParallelCopier:
    """Copies large arrays by two threads: the caller's, and one that helps.

    Args:
        run_beside: How to call something on the thread that helps.
        is_busy: Whether something else waits to be copied: then one thread copies alone.
        by: How each copies; lets other threads run.
    """

    def __init__(self, run_beside: RunBeside, is_busy: Callable[[], bool], by: Move = move) -> None:
        self._run_beside = run_beside
        self._is_busy = is_busy
        self._move = by

    def move(self, target: int, source: int, size: int) -> None:
        """A `Move` that lets other threads run; once it returns or raises, nobody copies."""
        if size < LEAST_HELPED or self._is_busy():
            self._move(target, source, size)
            return
        length = -(-size // PIECES)
        pieces = deque(
            (target + begin, source + begin, min(length, size - begin))
            for begin in range(0, size, length)
        )
        # Whoever helps has it, and leaves here what goes wrong.
        is_helped = threading.Lock()
        errors: list[BaseException] = []
        with contextlib.suppress(RuntimeError):  # the system has no thread for us
            self._run_beside(functools.partial(self._help, pieces, is_helped, errors))
        try:
            self._move_pieces(pieces)
        finally:
            # Nothing is left for a helper that has not begun.
            pieces.clear()
            with is_helped:
                pass
        if errors:
            raise errors[0]

    def _help(
        self,
        pieces: deque[tuple[int, int, int]],
        is_helped: threading.Lock,
        errors: list[BaseException],
    ) -> None:
        with is_helped:
            try:
                self._move_pieces(pieces)
            except BaseException as error:  # noqa: BLE001  the caller raises it
                errors.append(error)

    def _move_pieces(self, pieces: deque[tuple[int, int, int]]) -> None:
        """Copy as many of these as nobody else does."""
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:  # there is none left
                return
            self._move(*piece)
