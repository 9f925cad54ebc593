"""Part `copies`: ways of a batch from memory that processes share to the device.

The rows of a batch lie side by side, or apart, as inputs do that arrived at different times. A copy
from ordinary (pageable) memory goes through a buffer of the driver, and blocks the caller. From
pinned memory the device copies by itself.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.part import SEED, Run

TABLE = "copies"
# A row is an image for an ImageNet model as float32, and the memory has three times a batch.
NUMBERS = 3 * 224 * 224
TIMES = 3
# Batches of each measurement at least.
FEWEST = 5


def measure(run: Run) -> None:
    """Copy batches in each way, and check what has arrived."""
    count = run.pick(64, 8)
    run.title(TABLE, f"A batch of {count} rows of {4 * NUMBERS // 1000} KB to the device")
    batch = Batch(run, count)
    for repetition, (name, copy) in run.take_turns([*batch.list_ways().items()]):
        run.tell(TABLE, name, repetition, batch.time(copy))


class Batch:
    """Rows in memory of which another process could have written each, and the ways to copy them.

    Args:
        run: The settings.
        count: Number of rows.
    """

    def __init__(self, run: Run, count: int) -> None:
        self._run = run
        file = os.memfd_create("rows")
        size = TIMES * count * 4 * NUMBERS
        os.ftruncate(file, size)
        # The mapping lives as long as the array.
        self._memory = np.frombuffer(mmap.mmap(file, size), np.float32).reshape(-1, NUMBERS)
        os.close(file)
        self._memory[:] = 1
        order = np.random.default_rng(SEED).permutation(TIMES * count)[:count]
        self._apart = [self._memory[index] for index in order]
        self._whole = self._memory[:count]
        self._usual = np.ones((count, NUMBERS), np.float32)
        self._pinned = torch.empty((count, NUMBERS), pin_memory=run.is_gpu)
        self._target = torch.empty((count, NUMBERS), device=run.device)

    def list_ways(self) -> dict[str, Callable[[], object]]:
        """Return the ways to fill the memory of the device, by name."""
        target, pinned, usual = self._target, self._pinned, self._usual
        return {
            "whole": lambda: target.copy_(torch.from_numpy(self._whole)),
            "apart, gathered": lambda: target.copy_(torch.from_numpy(self._gather(usual))),
            "apart, gathered into pinned memory": lambda: target.copy_(
                torch.from_numpy(self._gather(pinned.numpy())), non_blocking=True
            ),
            "pinned": lambda: target.copy_(pinned, non_blocking=True),
        }

    def time(self, copy: Callable[[], object]) -> dict[str, float]:
        """Copy again and again; return median milliseconds, and those in which the caller waits.

        Raises:
            RuntimeError: The device has got other numbers.
        """
        whole: list[float] = []
        waited: list[float] = []
        end = time.perf_counter() + self._run.seconds
        while time.perf_counter() < end or len(whole) < FEWEST:
            self._memory[:, 0] = len(whole)
            self._pinned[:, 0] = len(whole)
            self._synchronize()
            start = time.perf_counter()
            copy()
            waited.append(time.perf_counter() - start)
            self._synchronize()
            whole.append(time.perf_counter() - start)
            if bool((self._target[:, 0] != len(whole) - 1).any()):
                raise RuntimeError("the device has got rows of another batch")
        rate = self._usual.nbytes / median(whole) / 1e9
        return {"ms": 1e3 * median(whole), "waited_ms": 1e3 * median(waited), "gb_per_s": rate}

    def _gather(self, target: NDArray[np.float32]) -> NDArray[np.float32]:
        """Copy the rows side by side."""
        start = target.ctypes.data
        for number, row in enumerate(self._apart):
            ctypes.memmove(start + number * row.nbytes, row.ctypes.data, row.nbytes)
        return target

    def _synchronize(self) -> None:
        if self._run.is_gpu:
            torch.cuda.synchronize()
