"""Models that answer in steps."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fast_batcher import Done, Grow, SteppedModel, StreamedModel


class Plan(NamedTuple):
    """What a `Counter` does for one request."""

    name: str
    # Number of chunks.
    length: int
    # The step at which something happens, the first is 1; and what.
    at: int = 0
    what: str = ""


class Refused(Exception):
    """A plan's error."""


LOST_DEVICE = "CUDA error: device-side assert triggered"
# What a plan does, and whether it has company.
OUT_OF_MEMORY = {("memory", False), ("memory", True), ("oom", True)}


class Counter(SteppedModel[Plan, Any]):
    """Counts the steps of each plan: the chunks are "name:1", "name:2" and so on.

    A plan may refuse to join ("join"), also for good ("fatal join"); fail alone ("fail") or with
    all others ("raise"), also for good ("fatal"); run out of memory ("memory"), or only beside
    others ("oom"); give an unpicklable ("lambda") or no chunk ("none"); give no chunk after this
    one ("silent"); hang ("hang"); kill the worker ("kill"); or end without a last chunk ("end").
    """

    def __init__(self, base: float = 0.0, each: float = 0.0) -> None:
        self._base, self._each = base, each
        # Streams that have joined, and those that have left.
        self.joined = self.left = 0

    def join(self, inputs: list[Plan]) -> list[Any]:
        if any(plan.what == "join" for plan in inputs):
            raise Refused("not this one")
        if any(plan.what == "fatal join" for plan in inputs):
            raise RuntimeError(LOST_DEVICE)
        if any(plan.what == "kill" and not plan.at for plan in inputs):
            os.kill(os.getpid(), signal.SIGKILL)
        self.joined += len(inputs)
        return [[plan, 0] for plan in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        if self._base or self._each:
            time.sleep(self._base + self._each * len(states))
        for plan, count in states:
            if count + 1 == plan.at and (plan.what, len(states) > 1) in OUT_OF_MEMORY:
                raise MemoryError(plan.name)
        return [self._count(state) for state in states]

    def _count(self, state: Any) -> Any:
        state[1] += 1
        plan, count = state
        if plan.name == "balance":
            return Done(self.joined - self.left)
        if plan.what == "silent" and count > plan.at:
            return None
        chunk = f"{plan.name}:{count}"
        if count == plan.at and plan.what:
            return self._act(plan, chunk)
        return Done(chunk) if count >= plan.length else chunk

    def _act(self, plan: Plan, chunk: str) -> Any:
        if plan.what == "raise":
            raise Refused(plan.name)
        if plan.what == "fatal":
            raise RuntimeError(LOST_DEVICE)
        if plan.what == "hang":
            time.sleep(3600)
        if plan.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        outcomes = {
            "stop": StopAsyncIteration(plan.name),
            "fail": Refused(plan.name),
            "end": Done(),
            "lambda": lambda: None,
            "none": None,
        }
        outcome = outcomes.get(plan.what, chunk)
        return outcome if plan.at < plan.length or type(outcome) is Done else Done(outcome)

    def leave(self, states: list[Any]) -> None:
        self.left += len(states)


class Crowded(Counter):
    """A `Counter` with memory for three streams; "failures" asks for the steps that failed."""

    failures = 0

    def step(self, states: list[Any]) -> list[Any]:
        if len(states) > 3:
            self.failures += 1
            raise MemoryError
        return super().step(states)

    def _count(self, state: Any) -> Any:
        return Done(self.failures) if state[0].name == "failures" else super()._count(state)


class Swelling(Counter):
    """A `Counter` whose streams cost 1 more with each step, whatever they give."""

    def step(self, states: list[Any]) -> list[Any]:
        outcomes = super().step(states)
        return [Grow(count, outcome) for (_, count), outcome in zip(states, outcomes, strict=True)]


class Fixed(StreamedModel[Plan, str]):
    """The same for a batch that stays as it is; the chunk also tells the size of the batch.

    A plan may refuse the batch ("join"), or end all streams of its batch ("raise", "memory").
    """

    def __init__(self, base: float = 0.0) -> None:
        self._base = base
        # Generators that have begun and not ended.
        self.live = 0

    def infer_stream(self, inputs: list[Plan]) -> Iterator[list[Any]]:
        if any(plan.what == "join" for plan in inputs):
            raise Refused("not this batch")
        return self._spell(inputs)

    def _spell(self, inputs: list[Plan]) -> Iterator[list[Any]]:
        self.live += 1
        try:
            for count in range(1, max(plan.length for plan in inputs) + 1):
                time.sleep(self._base)
                if any((plan.what, plan.at) == ("raise", count) for plan in inputs):
                    raise Refused("no further")
                if any((plan.what, plan.at) == ("memory", count) for plan in inputs):
                    raise MemoryError
                yield [self._count(plan, count, len(inputs)) for plan in inputs]
        finally:
            self.live -= 1

    def _count(self, plan: Plan, count: int, size: int) -> Any:
        if plan.name == "balance":
            return Done(self.live)
        chunk = f"{plan.name}:{count} of {size}"
        return Done(chunk) if count == plan.length else chunk


class Growing(SteppedModel[Plan, Any]):
    """Counts as a `Counter`; each step of a stream costs 1 more than the one before, first 1.

    A plan may give no chunk but the last ("quiet"). The answer to "balance" is the number of
    streams that have joined, and the highest cost of all streams in a step of several.
    """

    def __init__(self, base: float = 0.0) -> None:
        self._base = base
        self.joined = self.highest = 0
        self._live: list[Any] = []

    def join(self, inputs: list[Plan]) -> list[Any]:
        self.joined += len(inputs)
        states = [[plan, 0] for plan in inputs]
        self._live += states
        return states

    def step(self, states: list[Any]) -> list[Any]:
        time.sleep(self._base)
        outcomes = [self._count(state) for state in states]
        if len(states) > 1:
            self.highest = max(self.highest, sum(count for _, count in self._live))
        return outcomes

    def _count(self, state: Any) -> Any:
        state[1] += 1
        plan, count = state
        if plan.name == "balance":
            return Done((self.joined, self.highest))
        chunk = f"{plan.name}:{count}"
        if count == plan.length:
            return Done(chunk)
        return Grow(count + 1, None if plan.what == "quiet" else chunk)

    def leave(self, states: list[Any]) -> None:
        for state in states:
            self._live = [left for left in self._live if left is not state]


class Sums(SteppedModel[Any, int]):
    """Gives the sum of an array three times."""

    def join(self, inputs: list[Any]) -> list[Any]:
        return [[int(value.sum()), 0] for value in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        for state in states:
            state[1] += 1
        return [Done(total) if count == 3 else total for total, count in states]


class Endless(SteppedModel[Any, int]):
    """Keeps an array, and gives its sum again and again."""

    def join(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def step(self, states: list[Any]) -> list[Any]:
        return [int(value.sum()) for value in states]


class Large(SteppedModel[int, bytes]):
    """Gives as many chunks of a megabyte as the input says."""

    def join(self, inputs: list[int]) -> list[Any]:
        return [[count] for count in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        time.sleep(0.002)
        for state in states:
            state[0] -= 1
        return [bytes(2**20) if left else Done(bytes(2**20)) for (left,) in states]


class Sized(SteppedModel[int, tuple[int, bool]]):
    """Answers with the number of streams that a step was filled up to, and whether it was known.

    Known are the numbers that were computed before the first request.
    """

    allowed_batch_sizes = (1, 2, 4)

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._is_warm = False

    def join(self, inputs: list[int]) -> list[list[int]]:
        """Begin streams of so many chunks; a warm-up's have a negative number."""
        self._is_warm = self._is_warm or inputs[0] > 0
        return [[abs(count)] for count in inputs]

    def step(self, states: list[list[int]]) -> list[Any]:
        """Fill the states up."""
        size = next(size for size in self.allowed_batch_sizes if size >= len(states))
        if not self._is_warm:
            self._known.add(size)
        for state in states:
            state[0] -= 1
        chunk = (size, size in self._known)
        return [chunk if state[0] else Done(chunk) for state in states]

    def warmup_inputs(self) -> list[int]:
        """Return one stream of a chunk."""
        return [-1]
