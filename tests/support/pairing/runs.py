"""One run: a short random schedule of a case, and the oracle that watches it.

The oracle predicts nothing. It keeps the books of every call, and finds a fault where a promise of
the documents is broken: one end, the caller's own answer, one generation, the order of sessions and
streams, the deadline, the balance of the statistics, and nothing left.
"""

import asyncio
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from models import paired

from fast_batcher import DynBatcher
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    DeadlineExceededError,
    NotReadyError,
)
from fast_batcher.observing import (
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    Observer,
    RequestEnded,
    WorkerChanged,
)
from fast_batcher.testing import BatcherKit
from pairing.allowances import may_fail
from pairing.dimensions import ARRAYS, LARGE, PLACES, STEPPED, Case, Rule, make_options, model_of
from pairing.observing import Pulse, catch_logs, children_of, find_left, hold, quicken_scaling

# Seconds beyond a deadline, and beyond what the loop was late, after which a call is late.
SLACK = 0.35
# Seconds beyond that after which a call counts as never ended.
HANG = 3.0
# What is asked of the model by some inputs.
DEEDS = {"failing": paired.FAIL, "raising": paired.RAISE, "slow": paired.SLOW}
# Releases for which no policy is asked.
_UNASKED = ("full", "retry", "drain", "deadline")
# Seconds after a failed reload in which its model may answer, if a load of the old one fails, too.
WAY_BACK = 3.0
# Seconds in which a closed batcher releases everything: a host whose last process was killed waits
# 30 s for the next one.
RELEASE = 40.0
# Seconds that a request may wait beside a worker without a batch: a target of 0.3 s may be used up.
LONGEST_HOLD = 0.4
CANCELLED_END = "cancelled aclose"
# A whole run; then it is interrupted.
LIMIT = 45


@dataclass
class Report:
    """What a run has shown."""

    calls: int = 0
    answers: int = 0
    seconds: float = 0.0
    # Ends of calls, by name.
    ends: Counter[str] = field(default_factory=Counter)
    # Texts that begin with the kind of the fault and a colon.
    faults: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        return {fault.partition(":")[0] for fault in self.faults}


class Counting(Observer):
    """Counts the outcomes of requests; if it follows batches, also those of each worker."""

    def __init__(self, *, follows: bool) -> None:
        self.needs_context = follows
        self.outcomes: Counter[str] = Counter()
        # The ready workers, by index, with the costs of the batches that each has now.
        self.batches: dict[int, dict[int, float]] = {}

    def worker_changed(self, event: WorkerChanged) -> None:
        if event.change == "ready":
            self.batches[event.worker] = {}
        elif event.change in ("lost", "recycled", "removed"):
            self.batches.pop(event.worker, None)

    def batch_dispatched(self, event: BatchDispatched) -> None:
        if event.worker in self.batches:
            self.batches[event.worker][event.batch_id] = event.cost

    def batch_lost(self, event: BatchLost) -> None:
        self.batches.get(event.dispatched.worker, {}).pop(event.dispatched.batch_id, None)

    def batch_answered(self, event: BatchAnswered) -> None:
        self.batches.get(event.worker, {}).pop(event.batch_id, None)
        self.outcomes.update(request.outcome for request in event.requests)

    def request_ended(self, event: RequestEnded) -> None:
        self.outcomes[event.outcome] += 1


class Run:
    """The schedule of one case."""

    def __init__(self, case: Case, seed: int, notes: Path) -> None:
        self.case, self.notes, self.seed = case, notes, seed
        self.random = random.Random(f"{seed}")
        self.report = Report()
        self.pulse = Pulse()
        self.numbers = itertools.count(8)
        self.options = make_options(case, seed)
        self.arguments: dict[str, Any] = {
            "notes": str(notes),
            "outputs": case["outputs"],
            "load_seconds": 0.15 if case["loading"] == "slow" else 0.0,
            "seconds": self.random.choice((0.0, 0.002, 0.02)),
        }
        self.batcher: DynBatcher[Any, Any] = DynBatcher(
            model_of(case), model_kwargs=self.arguments, **self.options
        )
        # Moments, and the generations that may answer from then on.
        self.generations: list[tuple[float, set[int]]] = [(0.0, {0})]
        self.ended_at = float("inf")
        self.is_over = False
        # Answers that the callers keep, with what they said.
        self.kept: list[tuple[Any, paired.Told]] = []
        self.has_killed = False
        # The inputs, for as long as somebody keeps them; and the outcomes that were observed.
        self.inputs: list[weakref.ref[Any]] = []
        self.counting = Counting(follows=seed % 2 == 0)
        self.batcher.add_observer(self.counting)

    def fault(self, kind: str, text: str) -> None:
        self.report.faults.append(f"{kind}: {text}")
        self.is_over = self.is_over or kind == "never ended"

    # Calls.

    def make_input(self) -> tuple[Any, int]:
        """Make an input and the number that its answer must have."""
        number = next(self.numbers)
        is_known = self.case["cache"] != "none" and self.random.random() < 0.6
        if is_known:
            number = number % 7 + 1
        deed = DEEDS.get(self.case["inputs"], paired.PLAIN)
        is_plain = is_known or self.random.random() > 0.15
        deed = paired.PLAIN if is_plain else deed
        length = self.random.randint(0 if self.case["cost"] == "zero" else 1, 6)
        if self.case["model"] in STEPPED:
            length = max(length, 1) * self.random.choice((1, 1, 10))
        if is_known:  # equal inputs have equal numbers
            length = number
        is_large = self.case["inputs"] == "large"
        if self.case["model"] not in ARRAYS and not is_large:
            value = paired.Ticket((number, deed, length))
            self.inputs.append(weakref.ref(value))
            return value, number
        size = 2 + length if self.case["model"] in ("Padded", "Ragged") else 3
        row = np.zeros(size + LARGE * is_large, "int64")
        row[:2] = number, deed
        if is_large:
            row[2] = length
        self.inputs.append(weakref.ref(row))
        return row, number

    def options_of_call(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.case["callers"] == "impatient" and self.random.random() < 0.6:
            options["timeout"] = self.random.choice((0.02, 0.1, 0.3))
        if self.case["call"] != "session":
            if self.case["share"] == "several":
                options["share"] = self.random.choice(("a", "b", None, 3))
            if self.case["priority"] == "mixed":
                options["priority"] = self.random.choice((-1, 0, 5))
        return options

    async def watch(
        self, call: Callable[[], Awaitable[Any]], limit: float, *, is_own: bool, what: str
    ) -> Any:
        """Run one call and judge its end; return its answer, None without one."""
        began = time.monotonic()
        self.report.calls += 1
        task = asyncio.ensure_future(call())
        is_cancelled = self.case["callers"] == "cancelled" and self.random.random() < 0.3
        if is_cancelled:
            await asyncio.sleep(self.random.choice((0, 0.001, 0.01, 0.05)))
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=limit + HANG)
        took, lateness = time.monotonic() - began, self.pulse.lateness(began)
        if not done:
            self.fault("never ended", f"{what}, {took:.1f} s after it was made with {limit} s")
            task.cancel()
            return None
        if took > limit + SLACK + lateness:
            self.fault("late", f"{what}: {took:.2f} s for {limit} s (loop late {lateness:.2f} s)")
        if task.cancelled():
            self.report.ends["cancelled"] += 1
            if not is_cancelled:
                self.fault("cancelled", f"{what}: nobody has cancelled it")
            return None
        error = task.exception()
        if error is None:
            self.report.ends["answer"] += 1
            self.report.answers += 1
            return task.result()
        self.report.ends[type(error).__name__] += 1
        has_ended = self.ended_at < time.monotonic()
        is_late = isinstance(error, DeadlineExceededError | NotReadyError) and took >= limit - 0.02
        if not is_late and not may_fail(self.case, error, is_own=is_own, has_ended=has_ended):
            self.fault(f"error {type(error).__name__}", f"{what}: {error!s:.300}")
        return None

    def check(self, output: Any, number: int, began: float, what: str) -> paired.Told | None:
        """Check that an answer is the caller's own, of a model that could answer."""
        try:
            told = paired.read(output)
        except Exception as error:  # noqa: BLE001  an answer may be anything
            self.fault("wrong answer", f"{what}: {type(output)} {error!r:.200}")
            return None
        if told.number != number:
            self.fault("another's answer", f"{what}: {told}, expected number {number}")
        if told.overlapped:
            self.fault("loads overlap", f"{what}: models load side by side in one process")
        if told.generation not in self.allowed(began):
            self.fault("generation", f"{what}: {told}, allowed {self.allowed(began)}")
        self.kept.append((output, told))
        return told

    def allowed(self, began: float) -> set[int]:
        """Return the generations that may answer a call that was made at a moment."""
        before = [one for moment, one in self.generations if moment <= began][-1:]
        return set().union(*before, *(one for moment, one in self.generations if moment > began))

    async def caller(self) -> None:
        """Make calls until the run is over."""
        kind = self.case["call"]
        make = {"stream": self.stream, "session": self.session, "process_many": self.many}.get(kind)
        while not self.is_over:
            await (self.rows() if kind == "rows" else make() if make else self.one())
            await asyncio.sleep(self.random.choice((0, 0, 0.001, 0.01)))

    async def one(self) -> None:  # noqa: C901  the oracle of one call
        value, number = self.make_input()
        options, began = self.options_of_call(), time.monotonic()
        method = 0
        ask: Any = self.batcher.process_batched
        if self.case["model"] == "Methods" and self.random.random() < 0.5:
            method, ask = 1, self.batcher.methods.embed.process_batched
        elif self.case["call"] == "submit":
            ask = self.submit
        limit = options.get("timeout", self.options["timeout"])
        what = f"{self.case['call']}({value!r}, {options})"
        output = await self.watch(
            lambda: ask(value, **options), limit, is_own=int(value[1]) != 0, what=what
        )
        if output is None:
            return
        if self.case["model"] in STEPPED:
            for at, chunk in enumerate(output, 1):
                told = self.check(chunk, number, began, what)
                if told is not None and told.turn != at:
                    self.fault("order", f"{what}: {told} is chunk {at}")
            if len(output) != value[2]:
                self.fault("incomplete", f"{what}: {len(output)} chunks of {value[2]}")
            return
        told = self.check(output, number, began, what)
        if told is not None and (told.method, told.turn) != (method, 1):
            self.fault("wrong answer", f"{what}: {told}")

    async def submit(self, value: Any, **options: Any) -> Any:
        future = await asyncio.to_thread(self.batcher.submit, value, **options)
        return await asyncio.wrap_future(future)

    async def many(self) -> None:
        made = [self.make_input() for _ in range(self.random.choice((1, 3, 20)))]
        options, began = self.options_of_call(), time.monotonic()
        limit = options.get("timeout", self.options["timeout"])
        values = [value for value, _ in made]
        outputs = await self.watch(
            lambda: self.batcher.process_many(values, **options),
            limit,
            is_own=any(int(value[1]) for value in values),
            what=f"process_many({len(values)} inputs, {options})",
        )
        if outputs is None:
            return
        if len(outputs) != len(values):
            self.fault("incomplete", f"process_many: {len(outputs)} of {len(values)}")
        for output, (value, number) in zip(outputs, made, strict=False):
            for one in output if self.case["model"] in STEPPED else [output]:
                self.check(one, number, began, f"process_many of {value!r}")

    async def rows(self) -> None:
        made = [self.make_input() for _ in range(self.random.choice((1, 3, 10)))]
        size = min(len(value) for value, _ in made)
        options, began = self.options_of_call(), time.monotonic()
        limit = options.get("timeout", self.options["timeout"])
        batch = np.stack([value[:size] for value, _ in made])
        outputs = await self.watch(
            lambda: self.batcher.process_rows(batch, **options),
            limit,
            is_own=bool(batch[:, 1].any()),
            what=f"process_rows({batch.shape}, {options})",
        )
        for output, (_, number) in zip(outputs if outputs is not None else (), made, strict=False):
            self.check(output, number, began, f"process_rows({batch.shape})")

    async def stream(self) -> None:  # noqa: C901  the oracle of one stream
        value, number = self.make_input()
        options, began = self.options_of_call(), time.monotonic()
        limit = options.get("timeout", self.options["timeout"])
        what, is_own = f"stream({value!r}, {options})", value[1] != 0
        stream = await self.watch(
            lambda: self.batcher.stream(value, **options), limit, is_own=is_own, what=what
        )
        if stream is None:
            return
        count, generations = 0, set()
        leaves_at = self.random.choice((None, None, 2))
        while True:
            if count == leaves_at:
                await stream.aclose()
                return
            read = self.read_with_pings if self.case["callers"] == "pinging" else self.read_chunk
            chunk = await self.watch(
                partial(read, stream),
                limit,
                is_own=is_own,
                what=f"chunk {count + 1} of {what}",
            )
            if chunk is None:  # an error, or the caller has cancelled the read and leaves
                await stream.aclose()
                return
            if chunk is _END:
                break
            count += 1
            told = self.check(chunk, number, began, what)
            if told is not None:
                generations.add(told.generation)
                if told.turn != count:
                    self.fault("order", f"{what}: {told} is chunk {count}")
        if count != value[2] or (is_own and value[1] != paired.SLOW and count > 1):
            self.fault("incomplete", f"{what}: ended normally after {count} chunks of {value[2]}")
        if len(generations) > 1:
            self.fault("generation", f"{what}: chunks of {generations}")

    async def read_chunk(self, stream: Any) -> Any:
        return await anext(stream, _END)

    async def read_with_pings(self, stream: Any) -> Any:
        """Read as an endpoint that sends a ping when nothing comes for a while."""
        while True:
            try:
                return await asyncio.wait_for(anext(stream, _END), 0.005)
            except TimeoutError as error:
                if isinstance(error, BatcherError):
                    raise

    async def session(self) -> None:
        async with self.batcher.session() as session:
            # Calls that were made, of which some may not have been computed; the last answer.
            books = {"last": 0}
            callers = [self.speak(session, books) for _ in range(self.random.choice((1, 1, 3)))]
            with suppress(ValueError):
                await asyncio.gather(*callers)

    async def speak(self, session: Any, books: dict[str, int]) -> None:
        for _ in range(self.random.randint(1, 8)):
            if self.is_over:
                return
            value, number = self.make_input()
            options, began = self.options_of_call(), time.monotonic()
            limit = options.get("timeout", self.options["timeout"])
            what = f"session call {value!r}, {options}, {books['last']} before"
            before = books["last"]
            output = await self.watch(
                partial(session.process_batched, value, **options),
                limit,
                is_own=value[1] != 0,
                what=what,
            )
            if output is None:
                continue
            told = self.check(output, number, began, what)
            if told is None:
                return
            if told.turn <= before:
                self.fault("state", f"{what}: {told}, a fresh state")
            books["last"] = max(books["last"], told.turn)

    # Events.

    async def event(self) -> None:
        await asyncio.sleep(self.random.uniform(0.05, 0.3))
        doing: Any = getattr(self, "do_" + self.case["event"].replace(" ", "_"))
        for _ in range(self.random.choice((1, 1, 2))):
            if self.case["loading"] == "flaky":
                (self.notes / f"fail.{next(self.numbers)}").touch()
            try:
                await doing()
            except BatcherError as error:
                self.report.ends[f"{self.case['event']} {type(error).__name__}"] += 1
                if self.ended_at > time.monotonic() and self.case["loading"] != "flaky":
                    self.fault(f"{self.case['event']} {type(error).__name__}", f"{error!s:.300}")
            await asyncio.sleep(self.random.uniform(0, 0.2))

    async def do_none(self) -> None:
        await asyncio.sleep(0.2)

    async def do_reload(self, *, fails: str = "") -> None:
        before = self.generations[-1][1]
        new = next(self.numbers) + 1000
        self.generations.append((time.monotonic(), before | {new}))
        try:
            arguments = {**self.arguments, "generation": new, "fails": fails}
            await asyncio.wait_for(self.batcher.reload(model_kwargs=arguments), 20)
        except BatcherError:
            # The way back takes another load where one has failed.
            late = WAY_BACK if fails == "second" else 0.0
            self.generations.append((time.monotonic() + late, before))
            raise
        self.generations.append((time.monotonic(), {new}))

    async def do_failed_reload(self) -> None:
        with suppress(BatcherError):
            await self.do_reload(fails="always")
            self.fault("reload", "a model that cannot load was taken")

    async def do_lost_way_back(self) -> None:
        """Reload a model that loads in one worker alone, and back once less than it has to."""
        with suppress(BatcherError):
            await self.do_reload(fails="second")
            # A single worker has loaded it, and a further one never can.
            await self.do_reload()
        await asyncio.sleep(WAY_BACK)

    async def do_reconfigure(self) -> None:
        changes: dict[str, Any] = {"max_queue_size": self.random.choice((None, 2000))}
        if self.case["model"] not in STEPPED:
            changes |= {"max_batch_size": self.random.choice((1, 3, 16))}
        self.batcher.reconfigure(**changes)

    async def do_scale(self) -> None:
        counts: Any = self.random.choice(((2, 1), (3,), (1, 2), (2, 1, 2, 1)))
        if self.case["count"] == "1-2":  # then the library removes the second worker by itself
            counts = (2, (1, 2))
        for count in counts:
            self.batcher.reconfigure(num_workers=count)
            await asyncio.sleep(self.random.choice((0, 0.1)))

    async def do_kill(self) -> None:
        await self.signal_worker(signal.SIGKILL)

    async def do_kill_host(self) -> None:
        for pid in children_of(os.getpid())[:1]:
            self.has_killed = True
            os.kill(pid, signal.SIGKILL)

    async def do_stall(self) -> None:
        stopped = await self.signal_worker(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def signal_worker(self, number: int) -> list[int]:
        pids = children_of(os.getpid())
        if self.case["workers"] == "shared":
            workers = [worker for host in pids for worker in children_of(host)]
            stops_host = number == signal.SIGSTOP and self.random.random() < 0.5
            pids = pids if stops_host else workers
        for pid in pids[:1]:
            self.has_killed = self.has_killed or number == signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids[:1]

    async def let_others_come(self) -> None:
        """Let further API processes share the workers for a while; each second one is killed."""
        job = json.dumps((sys.path, self.case, self.seed, self.arguments))
        while self.case["others"] == "coming" and not self.is_over:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", OTHER, job), stdout=asyncio.subprocess.PIPE
            )
            try:
                assert process.stdout is not None
                told = await process.stdout.readline()
                if b"begun" in told and self.random.random() < 0.5:
                    process.kill()
                told += await process.stdout.read()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if b"WRONG" in told:
                self.fault("another's answer", f"in another process: {told.decode():.300}")

    async def look_for_room(self) -> None:
        """Look for requests that wait although a worker has nothing to do, or a place for them."""
        is_seen = self.counting.needs_context and self.case["workers"] != "shared"
        # Calls of a session wait for its worker.
        if not is_seen or self.case["call"] == "session":
            return

        def is_full(costs: Collection[float]) -> bool:
            return len(costs) > PLACES or (len(costs) > 1 and sum(costs) > most)

        is_stepped, most = self.case["model"] in STEPPED, self.options.get("max_batch_cost", 1e9)
        places = PLACES if is_stepped and most == 1e9 else 1
        since = time.monotonic()
        while True:
            workers = [costs.values() for costs in self.counting.batches.values()]
            waits = self.batcher.stats.waiting > 0 or (
                is_stepped and any(is_full(costs) for costs in workers)
            )
            now = time.monotonic()
            if not (waits and any(len(costs) < places for costs in workers)):
                since = now
            elif now - since > LONGEST_HOLD + self.pulse.lateness(since):
                self.fault("another has room", f"{self.counting.batches}, {self.batcher.stats}")
                return
            await asyncio.sleep(0.01)

    # The whole.

    async def run(self) -> None:
        began = time.monotonic()
        beating = asyncio.create_task(self.pulse.run())
        looking = asyncio.create_task(self.look_for_room())
        await self.batcher.open()
        if self.case["ending"] == "early drain":
            self.ended_at = began
            self.batcher.begin_drain()
            await self.refuse_new()
        others = asyncio.create_task(self.let_others_come())
        callers = [asyncio.create_task(self.caller()) for _ in range(self.random.randint(2, 8))]
        event = asyncio.create_task(self.event())
        if self.case["ending"] == "rest":
            await asyncio.wait([event])
            await asyncio.sleep(self.random.uniform(0.05, 0.3))
            self.is_over = True
            await self.join(callers)
            await self.probe()
        else:
            await asyncio.wait([event], timeout=self.random.uniform(0.1, 0.7))
        await self.end()
        self.is_over = True
        await self.join([*callers, event, others])
        for path in self.notes.glob("fail.*"):  # failures that no load has taken
            path.unlink(missing_ok=True)
        if self.case["ending"] == "reopen" and not self.report.faults:
            await self.batcher.open()
            self.generations.append((time.monotonic(), set(range(5000))))
            self.ended_at = float("inf")
            await self.probe()
            await self.batcher.aclose()
        beating.cancel()
        looking.cancel()
        self.check_figures()
        self.report.seconds = time.monotonic() - began

    async def probe(self) -> None:
        """A patient call after everything has to be answered, unless the model refuses it."""
        if self.report.faults:
            return
        for tries in itertools.count():
            value, number = self.make_input()
            value = (
                [number, 0, 2] if isinstance(value, list) else value * (np.arange(len(value)) != 1)
            )
            began = time.monotonic()
            try:
                output = await self.batcher.process_batched(value, timeout=15)
            except BatcherError as error:
                # A worker that is stopped or starts may be found dead by this call.
                if tries == 3:
                    self.fault("not well again", f"{type(error).__name__}: {error!s:.300}")
                    return
                await asyncio.sleep(0.2)
            else:
                for one in output if self.case["model"] in STEPPED else [output]:
                    self.check(one, number, began, "the last call")
                return

    async def end(self) -> None:
        """End the batcher as the case says."""
        self.ended_at = began = time.monotonic()
        ending, batcher = self.case["ending"], self.batcher
        if ending == "drain":
            batcher.begin_drain()
            await asyncio.sleep(self.random.choice((0, 0.05)))
            await self.refuse_new()
        if ending == "stop":
            batcher.stop()
            return
        closing = asyncio.create_task(batcher.aclose())
        self.pulse.blocked = 0.0
        if ending == CANCELLED_END:
            await asyncio.sleep(self.random.uniform(0, 0.1))
            closing.cancel()
        await asyncio.wait([closing], timeout=LIMIT / 2)
        took, late = time.monotonic() - began, self.pulse.lateness(began)
        most = batcher.settings["drain_timeout"].value + batcher.settings["stop_timeout"].value
        if took > most + 1.5 + late:
            self.fault("slow closing", f"{took:.2f} s, at most {most}")
        await asyncio.sleep(0.02)
        if self.pulse.blocked > 0.3:
            self.fault("loop blocked", f"{self.pulse.blocked:.2f} s while it closes")

    async def refuse_new(self) -> None:
        """Check that nothing begins after `begin_drain`."""
        value, _ = self.make_input()
        value = [9, 0, 2] if isinstance(value, list) else value
        ask: Any = self.batcher.process_batched
        async with AsyncExitStack() as stack:
            if self.case["call"] == "session":
                ask = (await stack.enter_async_context(self.batcher.session())).process_batched
            elif self.case["call"] == "stream":
                ask = self.batcher.stream
            try:
                await ask(value, timeout=2)
            except BatcherClosedError:
                return
        self.fault("begins while draining", self.case["call"])

    async def join(self, tasks: list[Any]) -> None:
        """Wait for tasks, and say which broke."""
        done, pending = await asyncio.wait(tasks, timeout=LIMIT / 2)
        if pending:
            self.fault("never ended", f"{len(pending)} callers, first {next(iter(pending))!r:.300}")
        for task in done | pending:
            task.cancel()
            if task in done and not task.cancelled() and task.exception() is not None:
                self.fault(
                    f"raised {type(task.exception()).__name__}", f"{task.exception()!r:.300}"
                )

    def check_figures(self) -> None:  # noqa: C901  the oracle at the end
        """Check the statistics after the end, and what the callers have kept."""
        stats = self.batcher.stats
        ended = stats.completed + stats.failed + stats.refused + stats.expired + stats.cancelled
        if stats.submitted != ended + stats.waiting + stats.running or stats.waiting:
            self.fault("statistics", f"{stats!r:.500}")
        seen = self.counting.outcomes
        for outcome in ("completed", "failed", "refused", "expired", "cancelled", "rejected"):
            count = getattr(stats, outcome)
            if self.case["workers"] != "shared" and seen[outcome] != count:
                self.fault("observed", f"{outcome}: {seen[outcome]} observed, {count} counted")
        is_whole = self.case["cache"] == "none" and not self.has_killed
        if self.case["workers"] == "shared" and self.case["ending"] in ("reopen", CANCELLED_END):
            # Another host may have begun to count, or the last counts have not been waited for.
            is_whole = False
        if (
            is_whole
            and self.case["call"] == "process_batched"
            and stats.completed < self.report.answers
        ):
            self.fault("statistics", f"{self.report.answers} answers, {stats.completed} completed")
        changed = [told for output, told in self.kept if paired.read(output) != told]
        if changed:
            self.fault("changed later", f"{len(changed)} of {len(self.kept)}, first {changed[0]}")
        rule = self.options.get("policy")
        # Full batches and retries leave without a question.
        asking = stats.batches - sum(stats.releases.get(one, 0) for one in _UNASKED)
        if isinstance(rule, Rule) and asking > 30 and not rule.asked:
            self.fault("rule never asked", f"{stats.releases}")
        for path in self.notes.glob("states.*"):
            begun, left = map(int, path.read_text().split())
            if begun != left:
                self.fault("states not left", f"{left} of {begun} were left")


_END = object()
# A further API process. The same search path: else it would have a host of its own.
OTHER = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv[1])
from pairing.other import main
main(*arguments)
"""


class _TooLongError(Exception):
    """A run has not ended."""


def _interrupt(*_: object) -> None:
    raise _TooLongError


def perform(case: Case, seed: int) -> Report:
    """Run a case once. The main thread, without a running event loop."""
    resource_tracker.ensure_running()  # Python keeps its pipe
    home = Path(tempfile.mkdtemp(prefix="fbp", dir="/tmp"))
    os.environ["XDG_RUNTIME_DIR"] = str(home)
    before = hold()
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(LIMIT)
    report, inputs = Report(), list[weakref.ref[Any]]()
    try:
        quickened = quicken_scaling() if case["count"] == "1-2" else nullcontext()
        with warnings.catch_warnings(), catch_logs() as texts, quickened:
            warnings.simplefilter("ignore")
            run = Run(case, seed, home)
            report = run.report
            with BatcherKit() if case["workers"] == "kit" else nullcontext() as kit:
                asyncio.run(run.run())
            if kit is not None:
                kit.reset()  # it records inputs, and the batcher keeps it
            inputs = run.inputs
            del run
        report.faults += [f"log: {text[:400]}" for text in texts]
    except _TooLongError:
        report.faults.append(f"never ended: the run, after {LIMIT} s")
    except BatcherError as error:
        report.faults.append(f"raised {type(error).__name__}: {error!s:.300}")
    finally:
        signal.alarm(0)
    left = find_left(before, 1.0 if report.faults else RELEASE)
    if left and not report.faults:
        report.faults.append(f"left: {'; '.join(left)[:400]}")
    # A thread that was not waited for has ended now.
    gc.collect()
    kept = [value for one in inputs if (value := one()) is not None]
    if kept and not report.faults:
        report.faults.append(f"kept inputs: {len(kept)} of {len(inputs)}: {kept[0]!r}")
    for pid in set(map(str, children_of(os.getpid()))) - before["process"]:
        for one in (*children_of(int(pid)), int(pid)):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    shutil.rmtree(home, ignore_errors=True)
    return report
