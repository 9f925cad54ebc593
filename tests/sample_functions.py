"""Functions that tests decorate for a worker process, which imports them from here."""

import asyncio
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fast_batcher import aio, dynamically, inference
from fast_batcher.types import PriorityStrategy


@dynamically(process=True, batch_size=4)
def double(items: list[int]) -> list[int]:
    """Double each item."""
    return [2 * item for item in items]


@dynamically(process=True)
def pid_of(items: list[int]) -> list[int]:
    """Where it runs."""
    return [os.getpid() for _ in items]


@aio.dynamically(process=True)
async def double_async(items: list[int]) -> list[int]:
    """Double each item, and wait for it."""
    await asyncio.sleep(0)
    return [2 * item for item in items]


@dynamically(process=True)
def fail_for_negative(items: list[int]) -> list[Any]:
    """Raise for a batch, and give an exception for a single item."""
    if min(items) < -1:
        raise ValueError("too small")
    return [KeyError(item) if item < 0 else item for item in items]


@inference.dynamically(process=True, pad_tokens={"ids": 9})
def double_features(features: dict[str, Any]) -> Any:
    """Double an array."""
    return features["ids"] * 2


@dynamically(process=True, batch_size=4)
def number_held(items: list[int | str]) -> list[int]:
    """The place of each item in the order of computing; a path is read from, which may wait."""
    for item in items:
        if isinstance(item, str):
            Path(item).read_bytes()
    return [next(_numbers) for _ in items]


@aio.dynamically(
    process=True,
    batch_size=2,
    small_batch_threshold=1,
    priority_strategy=PriorityStrategy.LENGTH,
)
def number_by_length(items: list[str]) -> list[int]:
    """The same."""
    for item in items:
        if item.startswith("/"):
            Path(item).read_bytes()
    return [next(_numbers) for _ in items]


@dynamically(process=True, batch_size=4, max_queue_size=4)
def double_few(items: list[int]) -> list[int]:
    """Double each item; few may wait."""
    return [2 * item for item in items]


def tensor_of(items: list[int]) -> Any:
    """A row of 1000 numbers for each item."""
    import torch  # others need not load it

    return torch.tensor(items, dtype=torch.float32)[:, None].repeat(1, 1000)


def tensors_of(items: list[int]) -> list[Any]:
    """The same as a list."""
    return list(tensor_of(items))


def plain(items: list[int]) -> list[int]:
    """Not decorated."""
    return items


_numbers = itertools.count()


@dynamically(process=True, max_batch_length=5)
def total_length(items: list[str]) -> list[int]:
    """The length of its batch, for each item."""
    return [sum(map(len, items)) for _ in items]


class Model:
    """A class with a method that no worker process can have."""

    @dynamically(process=True)
    def scale(self, items: list[int]) -> list[int]:
        """Never called."""
        return items

    @staticmethod
    @dynamically(process=True)
    def halve(items: list[int]) -> list[int]:
        """Halve each item."""
        return [item // 2 for item in items]


def add_one(func: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    """Add one to each output: a decorator of the usual kind."""

    @functools.wraps(func)
    def wrapper(items: list[int]) -> list[int]:
        return [1 + output for output in func(items)]

    return wrapper


@add_one
def double_and_add_one(items: list[int]) -> list[int]:
    """Double each item."""
    return [2 * item for item in items]


double_and_add_one_in_a_worker = dynamically(process=True)(double_and_add_one)
