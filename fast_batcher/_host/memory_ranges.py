"""Ranges of the host's shared memory: who has one, and when it is free again.

Host process, on the event loop's thread.
"""

import asyncio
import logging
import os
from contextvars import Context
from typing import NamedTuple

from fast_batcher._host.protocol import MAX_RANGES
from fast_batcher._host.tenant import Tenant
from fast_batcher._shared_memory.inputs import Slabs

logger = logging.getLogger("fast_batcher")


class Grant(NamedTuple):
    """A range for an API process."""

    # Begin and length in bytes.
    start: int
    length: int
    # Descriptors for the API process: the memory, and the writing end of the lifeline.
    memory: int
    lifeline: int


class MemoryRanges:
    """The free ranges, and the ranges that processes have.

    A range is granted again only when its API process has left, no process has the range mapped any
    more, and no worker has a view of it. An array of `allocate_input` that outlives its batcher
    keeps its range, in a forked child too.
    """

    def __init__(
        self, slabs: Slabs | None, size: int, loop: asyncio.AbstractEventLoop, name: str
    ) -> None:
        # None without shared memory.
        self._slabs = slabs
        # Bytes of a range.
        self._size = size
        self._loop = loop
        self._name = name
        self._free = [*range(MAX_RANGES)]
        # Range of each API process, by the id of its tenant.
        self._granted: dict[int, int] = {}
        # Ranges that a process may have mapped: the reading end of the lifeline, by range.
        self._lifelines: dict[int, int] = {}
        # Tenants that are gone.
        self._leaving: list[Tenant] = []
        self._has_warned = False

    def grant(self, tenant: Tenant) -> Grant | None:
        """Grant an API process a range; None if none is free, or no descriptor."""
        if self._slabs is None:
            return None
        if not self._free:
            self._warn()
            return None
        try:
            memory = self._slabs.duplicate_fd()
        except OSError:
            return None
        try:
            lifeline, end = os.pipe()
        except OSError:
            os.close(memory)
            return None
        number = self._granted[tenant.id] = self._free.pop(0)
        self._lifelines[number] = lifeline
        Context().run(self._loop.add_reader, lifeline, self._unmapped, number)
        return Grant(number * self._size, self._size, memory, end)

    def leave(self, tenant: Tenant) -> None:
        """Note that an API process is gone."""
        self._leaving.append(tenant)
        self.reuse()

    def reuse(self) -> None:
        """Free the unused ranges of API processes that have exited."""
        for tenant in [*self._leaving]:
            tenant.take_freed()
            number = self._granted.get(tenant.id)
            if tenant.has_rows or number in self._lifelines:
                continue
            self._leaving.remove(tenant)
            if number is not None:
                self._free.append(self._granted.pop(tenant.id))

    def _unmapped(self, number: int) -> None:
        lifeline = self._lifelines.pop(number)
        self._loop.remove_reader(lifeline)
        os.close(lifeline)
        self.reuse()

    def _warn(self) -> None:
        kept = len(self._leaving)
        if kept and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs of a server process go through its socket, which is slower: %d "
                "of %d ranges of the shared memory are kept by arrays of allocate_input() whose "
                "batchers are closed; drop these arrays",
                *(self._name, kept, MAX_RANGES),
            )
