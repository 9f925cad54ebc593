"""The memory that tells, after the death of a process, what it was doing."""

import multiprocessing
import os

from fast_batcher._transport.mark import Mark


def write_and_die(mark: Mark) -> None:
    mark.numbers[0] = 8
    mark.numbers[1] = 2**40 + 1
    mark.numbers[2] = 1
    os._exit(9 if mark.is_to_end else 8)


def test_nothing_is_marked_at_first() -> None:
    mark = Mark()
    assert (mark.taken, mark.begun, mark.inherited) == (None, None, None)
    assert not mark.is_to_end
    mark.close()


def test_what_was_written_reaches_the_process_and_outlives_it() -> None:
    mark = Mark()
    mark.let_sigterm_end()
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(mark,))
    process.start()
    mark.close_fd()
    process.join()
    assert process.exitcode == 9
    assert (mark.taken, mark.begun, mark.inherited) == (7, 2**40, 0)
    process.close()
    mark.close()
    mark.close_fd()
