"""S6: large inputs of every kind, with checksums, while workers are killed and callers cancel."""

import asyncio
import ctypes
import gc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.soak.checks import Checks, checksum, is_echoed
from benchmarks.soak.kills import WORKERS, Plan, Run, shorten_backoff
from benchmarks.soak.report import Findings
from benchmarks.soak.watch import (
    descriptors,
    probing,
    shared_mappings,
    shared_names,
    worker_pids,
)
from fast_batcher import DynBatcher

T = TypeVar("T")

KINDS = ("bytes", "array", "strided", "tensor", "dict")
DTYPES = ("u1", "f4", "i8")
# Arrays that many callers send: those of one layout share memory. Float32; their share of all
# inputs, and the share of them that is filled into an array of the batcher.
COMMON_SHAPES = ((16_000,), (3, 224, 224), (1_500_000,))
COMMON = 0.3
ALLOCATED = 0.2
# A larger input is made and checked in a thread: it would block the loop for 0.1 ms.
MOST_ON_LOOP = 64 * 1024
# Between two kills, seconds; none while a worker loads PyTorch, which takes as long.
KILL_PAUSES = (0.2, 2.0)
# What the parent may use more at the end, bytes. glibc counts as used what a thread has freed and
# keeps for itself, up to a quarter of a megabyte each (its tcache); a leak would be more.
MOST_GROWTH = 8 * 2**20


class Payload(NamedTuple):
    """One caller's input."""

    # Unique among all inputs of the run.
    nonce: int
    checksum: int
    # Bytes, an array, a tensor, or a dict with some of them.
    value: Any


@dataclass(frozen=True)
class Sizes:
    """How many inputs, and how large: log-uniform from one byte on, so most are small."""

    name: str
    count: int
    most: int
    callers: int


# Enough callers to keep both workers busy; fewer with large inputs, all of which are in memory.
FULL = (Sizes("to 50 MB", 30_000, 50_000_000, 12), Sizes("to 1 MB", 1_000_000, 1_000_000, 64))
SHORT = (Sizes("to 50 MB", 48, 50_000_000, 12), Sizes("to 1 MB", 256, 1_000_000, 64))


class Source:
    """Makes inputs out of one block of random bytes: arrays and tensors are views of it."""

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        # Twice as long, for strided arrays.
        self._block = np.random.default_rng(seed).integers(0, 256, 2 * most, dtype=np.uint8)

    def draw_size(self, rng: random.Random) -> int:
        """Draw a size from the log-uniform distribution, bytes."""
        return int(self._most ** rng.random())

    def make(self, rng: random.Random, size: int) -> Any:
        """Make an input of this many bytes, or up to seven fewer."""
        return self._make(rng, size, rng.choice(KINDS))

    def make_common(self, rng: random.Random) -> Any:
        """Make an array of one of the shapes that many callers send."""
        shape = rng.choice([one for one in COMMON_SHAPES if 4 * math.prod(one) <= self._most])
        return self._part(rng, 4 * math.prod(shape)).view("f4").reshape(shape)

    def _make(self, rng: random.Random, size: int, kind: str) -> Any:
        if kind == "dict":
            part = rng.randint(0, size)
            first, other = (rng.choice(KINDS[:-1]) for _ in range(2))
            return {
                "first": self._make(rng, part, first),
                "note": b"between",
                "other": self._make(rng, size - part, other),
            }
        if kind == "strided":
            return self._part(rng, 2 * size)[::2]
        part_of_block = self._part(rng, size)
        if kind == "bytes":
            return part_of_block.tobytes()
        dtype = np.dtype(rng.choice(DTYPES))
        array = part_of_block[: size // dtype.itemsize * dtype.itemsize].view(dtype)
        if kind == "tensor":
            import torch

            return torch.from_numpy(array)
        # Two axes where the length allows it.
        return array.reshape(2, -1) if len(array) % 2 == 0 else array

    def _part(self, rng: random.Random, size: int) -> Any:
        # At a multiple of eight, as numbers are.
        start = rng.randint(0, (len(self._block) - size) // 8) * 8
        return self._block[start : start + size]


@dataclass
class PayloadRun(Run):
    """Callers that check what the model has read, and what comes back."""

    source: Source = field(kw_only=True)
    # By caller, what came back last and its checksum: it must not change.
    held: dict[int, tuple[Any, int]] = field(default_factory=dict)
    sent_bytes: int = 0
    echoed: int = 0

    async def be_caller(self, number: int) -> None:
        """Make one call after the other."""
        rng = random.Random(f"{self.seed} {number}")
        for sequence in range(self.plan.requests // self.plan.callers):
            value, found = await self._draw(rng)
            nonce = sequence * self.plan.callers + number
            await self.call(rng, Payload(nonce, found, value))

    def value_of(self, item: Payload) -> Any:
        """Return the model's input, without what only the caller knows."""
        return item.value

    async def is_right(self, item: Payload, answer: Any) -> bool:
        """Check the checksum, and byte for byte what was to come back."""
        found, echo = answer
        if not is_echoed(item.checksum):
            return bool(found == item.checksum and echo is None)
        self.echoed += 1
        caller = item.nonce % self.plan.callers
        # In a thread whatever the size: to determine the size would cost as much.
        is_same: bool = found == item.checksum
        return is_same and await _in_thread(self._compare, caller, echo, item.checksum)

    async def _draw(self, rng: random.Random) -> tuple[Any, int]:
        """Make an input and its checksum."""
        if rng.random() >= COMMON:
            size = self.source.draw_size(rng)
            self.sent_bytes += size
            return await _in_thread_if_large(size, self._with_checksum, self.source.make, rng, size)
        value = self.source.make_common(rng)
        self.sent_bytes += value.nbytes
        if rng.random() < ALLOCATED:
            allocated = self.batcher.allocate_input(value.shape, value.dtype)
            await _in_thread_if_large(value.nbytes, np.copyto, allocated, value)
            value = allocated
        if rng.random() < 0.5:
            import torch

            value = torch.from_numpy(value)
        return await _in_thread_if_large(value.nbytes, self._with_checksum, lambda: value)

    def _with_checksum(self, make: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
        value = make(*arguments)
        return value, checksum(value)

    def _compare(self, caller: int, echo: Any, expected: int) -> bool:
        before, wanted = self.held.get(caller, (b"", 0))
        self.held[caller] = echo, expected
        return checksum(before) == wanted and checksum(echo) == expected

    async def kill(self) -> None:
        """Kill a random worker now and then, while all workers are ready."""
        rng = random.Random(self.seed)
        while True:
            await asyncio.sleep(rng.uniform(*KILL_PAUSES))
            if self.batcher.stats.workers_ready == WORKERS:
                pids = await asyncio.get_running_loop().run_in_executor(None, worker_pids)
                self.kill_one(rng, pids)


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


async def _in_thread_if_large(size: int, function: Callable[..., T], *arguments: Any) -> T:
    if size <= MOST_ON_LOOP:
        return function(*arguments)
    return await _in_thread(function, *arguments)


async def _soak(sizes: Sizes, seed: int, findings: Findings) -> None:
    plan = Plan(sizes.count, max_batch_size=8, callers=sizes.callers, cancel_rate=0.05)
    batcher = DynBatcher(Checks, plan.max_batch_size, num_workers=WORKERS, max_restarts=None)
    run = PayloadRun(plan, seed, "", batcher, source=Source(sizes.most, seed))
    started = monotonic()
    async with batcher:
        unended = await run.work(f"S6 payloads {sizes.name}")
        seconds = monotonic() - started
        run.tell(findings, unended, f"{sizes.name}: ")
    findings.tell(f"{sizes.name}: MB/s", run.sent_bytes / seconds / 1e6)
    findings.tell(f"{sizes.name}: came back", run.echoed)


class _Allocated(ctypes.Structure):
    """What glibc's allocator reports of itself; mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def used_memory() -> int:
    """Bytes that this process has allocated and not freed.

    Resident memory says less: the allocator keeps a hundred megabytes that threads have freed.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Allocated
    told = mallinfo2()
    return int(told.uordblks + told.hblkhd)


async def s6(short: bool, seed: int) -> Findings:
    """Send inputs of every kind, with checksums; workers are killed and callers cancel."""
    findings = Findings("S6 payloads")
    shorten_backoff()
    # The first run starts what lives as long as the interpreter, and loads PyTorch.
    await _soak(Sizes("before", 48, 1_000_000, 12), seed, Findings("not told"))
    before = shared_names()
    held, memory = descriptors(), used_memory()
    async with probing() as probe:
        for sizes in SHORT if short else FULL:
            await _soak(sizes, seed, findings)
    growth = used_memory() - memory
    findings.none("descriptors beyond those before", max(0, descriptors() - held))
    findings.none("mappings of shared memory left", shared_mappings())
    findings.none("worker processes left", len(worker_pids()))
    findings.none("new entries in /dev/shm and TMPDIR", len(shared_names() - before))
    findings.check(
        "memory that the parent uses beyond that before, MB",
        growth / 2**20,
        f"below {MOST_GROWTH // 2**20}",
        holds=growth < MOST_GROWTH,
    )
    probe.tell(findings, large_inputs=True)
    return findings
