"""Models of the suite of pairs: each answer names its input, and what its model was.

An input is `(number, deed, length)`; with a collation, an integer array that begins with the number
and the deed. An answer has the `FIELDS`, as a `Told`, a row of an array that is filled again, or an
object whose attributes raise. Worker, whichever kind.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fast_batcher import (
    Collation,
    Done,
    InferenceModel,
    SessionModel,
    SteppedModel,
    StreamedModel,
    batchable,
)

# What is done for an input.
PLAIN, FAIL, RAISE, SLOW = range(4)
# Seconds that a batch with a SLOW input takes.
SLOWNESS = 0.6
# Sizes of a compiled model.
SIZES = (1, 2, 4, 8)


class Told(NamedTuple):
    """An answer."""

    number: int
    generation: int
    # Calls of the session so far, chunks of the stream so far; 1 without either.
    turn: int
    # The number of the method.
    method: int
    # 1 if models were loaded side by side in one process.
    overlapped: int


class Ticket(list[int]):
    """An input, `(number, deed, length)`; weak references to it show who keeps it."""


class Odd:
    """An object whose attributes raise, as those of a lazy proxy whose target is gone."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def __reduce__(self) -> Any:
        return Odd, (self.told,)

    def _refuse(self) -> Any:
        raise RuntimeError("the target of this proxy is gone")

    __class__ = property(_refuse)
    nbytes = property(_refuse)
    shape = property(_refuse)


def read(output: Any) -> Told:
    """Return what an answer says, whichever kind it is."""
    if type(output) is Odd:
        told: Told = object.__getattribute__(output, "told")
        return told
    return Told(*map(int, output))


class Refused(Exception):
    """An input's error."""


# Loads at this moment, in this process, and the seed that each of them sets.
_loading: list[int] = []


class Traits:
    """What the models have in common: their arguments, and how they load and answer."""

    def __init__(
        self,
        generation: int = 0,
        *,
        notes: str = "",
        outputs: str = "own",
        load_seconds: float = 0.0,
        seconds: float = 0.0,
        fails: str = "",
    ) -> None:
        self.generation, self.notes = generation, notes
        is_collated = getattr(self, "collation", None) is not None
        self.outputs = "arrays" if is_collated and outputs == "own" else outputs
        self.seconds = seconds
        mine = threading.get_ident()
        _loading.append(mine)
        time.sleep(load_seconds)
        # As a loader that sets the default dtype of its library for the time of the load.
        self.overlapped = int(_loading != [mine])
        _loading.remove(mine)
        if fails == "always" or self._is_told_to_fail():
            raise RuntimeError("cannot load")
        if fails == "second":
            self._fail_but_once()
        self.rows = np.zeros((256, len(Told._fields)), "int64")
        # States that have begun, and those that were left.
        self.begun = self.left = 0

    def _is_told_to_fail(self) -> bool:
        """Take one of the failures that the schedule has left for the next loads."""
        for path in Path(self.notes).glob("fail.*") if self.notes else ():
            try:
                path.unlink()
            except FileNotFoundError:  # another worker has taken it
                continue
            return True
        return False

    def _fail_but_once(self) -> None:
        """Load in one worker alone; then the next load fails, too: the way back of a reload."""
        try:
            (Path(self.notes) / f"loaded.{self.generation}").touch(exist_ok=False)
        except FileExistsError:
            (Path(self.notes) / "fail.back").touch()
            raise RuntimeError("cannot load a second time") from None

    def work(self, deeds: list[int]) -> None:
        time.sleep(SLOWNESS if SLOW in deeds else self.seconds)
        if RAISE in deeds:
            raise Refused("all of them")

    def tell(self, told: list[Told], deeds: list[int]) -> Any:
        """Make the outputs of a batch."""
        if self.outputs == "buffer":
            if FAIL in deeds:
                raise Refused("an array cannot hold errors")
            self.rows[: len(told)] = told
            return self.rows[: len(told)]
        kind: Any = {"odd": Odd, "arrays": np.array}.get(self.outputs, tuple)
        return [
            Refused("not this one") if deed == FAIL else kind(one)
            for one, deed in zip(told, deeds, strict=True)
        ]

    def answer(self, inputs: Any, method: int = 0) -> Any:
        deeds = [int(one[1]) for one in inputs]
        self.work(deeds)
        told = [Told(int(one[0]), self.generation, 1, method, self.overlapped) for one in inputs]
        return self.tell(told, deeds)

    def close(self) -> None:
        if self.notes:
            # Written under another name first: the oracle may read it at any moment.
            name = f"{os.getpid()}.{id(self)}"
            path = Path(self.notes) / f"written.{name}"
            path.write_text(f"{self.begun} {self.left}")
            path.rename(Path(self.notes) / f"states.{name}")


class Plain(Traits, InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> Any:
        return self.answer(inputs)


class Methods(Traits, InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> Any:
        return self.answer(inputs)

    @batchable(max_batch_size=3)
    def embed(self, inputs: list[Any]) -> Any:
        return self.answer(inputs, 1)


class Stages(Traits, InferenceModel[Any, Any]):
    def prepare(self, value: Any) -> Any:
        return [value]

    def infer(self, inputs: list[Any]) -> Any:
        return self.answer([value for (value,) in inputs])

    def finish(self, output: Any) -> Any:
        return output


class Stacked(Traits, InferenceModel[Any, Any]):
    collation = Collation.stack(outputs="rows")

    def infer(self, inputs: Any) -> Any:
        return self.answer(inputs)


class Padded(Stacked):
    collation = Collation.pad(value=0, outputs="rows")


class Ragged(Stacked):
    collation = Collation.concatenate(outputs="rows")

    def infer(self, inputs: Any) -> Any:
        joined, offsets = inputs
        return self.answer([joined[at : at + 2] for at in offsets[:-1]])


class Stepped(Traits, SteppedModel[Any, Any]):
    def join(self, inputs: list[Any]) -> Any:
        self.begun += len(inputs)
        return [[value, 0] for value in inputs]

    def step(self, states: list[Any]) -> Any:
        ends = [state[0][1] for state in states]
        deeds = [deed if state[1] == 1 else PLAIN for deed, state in zip(ends, states, strict=True)]
        self.work(deeds)
        told = []
        for state in states:
            state[1] += 1
            told.append(Told(state[0][0], self.generation, state[1], 0, self.overlapped))
        chunks = self.tell(told, deeds)
        if isinstance(chunks, np.ndarray):
            if not any(state[1] >= state[0][2] for state in states):
                return chunks
            chunks = chunks.copy()  # a list of views would change, as the documents say
        return [
            Done(chunk) if state[1] >= state[0][2] and deed != FAIL else chunk
            for chunk, state, deed in zip(chunks, states, deeds, strict=True)
        ]

    def leave(self, states: list[Any]) -> None:
        self.left += len(states)


class Streamed(Traits, StreamedModel[Any, Any]):
    def infer_stream(self, inputs: list[Any]) -> Iterator[Any]:
        for count in range(1, max(one[2] for one in inputs) + 1):
            deeds = [one[1] if count == 2 else PLAIN for one in inputs]
            self.work(deeds)
            told = [Told(one[0], self.generation, count, 0, self.overlapped) for one in inputs]
            chunks = self.tell(told, deeds)
            if isinstance(chunks, np.ndarray):
                chunks = chunks.copy()
            yield [
                chunk
                if count < one[2] or deed == FAIL
                else Done(chunk if count == one[2] else None)
                for chunk, one, deed in zip(chunks, inputs, deeds, strict=True)
            ]


class Remembering(Traits, SessionModel[Any, Any, Any]):
    def begin(self) -> Any:
        self.begun += 1
        return [0]

    def infer(self, inputs: list[Any], states: list[Any]) -> Any:
        deeds = [one[1] for one in inputs]
        self.work(deeds)
        told = []
        for one, state in zip(inputs, states, strict=True):
            state[0] += 1
            told.append(Told(one[0], self.generation, state[0], 0, self.overlapped))
        return self.tell(told, deeds)

    def leave(self, states: list[Any]) -> None:
        self.left += len(states)


# The same with sizes that a compiled model has.


class PlainSized(Plain):
    allowed_batch_sizes = SIZES


class MethodsSized(Methods):
    allowed_batch_sizes = SIZES


class StagesSized(Stages):
    allowed_batch_sizes = SIZES


class StackedSized(Stacked):
    collation = Collation.stack(outputs="rows", allowed_batch_sizes=SIZES)


class PaddedSized(Stacked):
    collation = Collation.pad(
        value=0, outputs="rows", allowed_batch_sizes=SIZES, allowed_lengths=(4, 8, 8_008)
    )


class RaggedSized(Ragged):
    allowed_batch_sizes = SIZES


class SteppedSized(Stepped):
    allowed_batch_sizes = SIZES


class StreamedSized(Streamed):
    allowed_batch_sizes = SIZES


class RememberingSized(Remembering):
    allowed_batch_sizes = SIZES
