"""The memory that tells, after the death of a process, what it was doing."""

import multiprocessing
import os

import pytest

from fast_batcher._transport.progress import WorkerProgress


def write_and_die(progress: WorkerProgress) -> None:
    progress.taken = 7
    progress.begun = 2**40
    progress.inherited = 0
    os._exit(9 if progress.is_to_end else 8)


@pytest.mark.slow
def test_progress_outlives_its_process() -> None:
    progress = WorkerProgress()
    progress.let_sigterm_end()
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(progress,))
    process.start()
    progress.close_fd()
    process.join()
    assert process.exitcode == 9
    assert (progress.taken, progress.begun, progress.inherited) == (7, 2**40, 0)
    process.close()
    progress.close()
    progress.close_fd()
