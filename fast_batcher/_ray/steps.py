"""The steps of an actor with a `SteppedModel`. Host process, on the event loop's thread.

Each step is a call of the actor. While one runs, the next waits behind it in the actor, so that the
model does not wait for the network; streams that arrive meanwhile join one step later.
"""

from collections.abc import Callable, Iterator

from fast_batcher._transport.channels import Frame

# Calls that the actor has at a time: one computes, one waits.
MOST_CALLS = 2

# Start and length of a row in the shared memory.
Row = tuple[int, int]


class StepCalls:
    """The calls of one actor, in their order."""

    def __init__(self, call: Callable[[int, list[Frame], list[Row]], None]) -> None:
        self._call = call
        # What goes with the next call: frames, rows of shared memory, and the ids of their streams.
        self._frames: list[Frame] = []
        self._rows: list[Row] = []
        self._streams: list[int] = []
        # Numbers of the next call, of the next answer, and of the last call with frames.
        self._next = self._due = 0
        self._last_with_frames = -1
        # Answers that came before their turn, and the streams that went with each call.
        self._answers: dict[int, tuple[bytes, bool]] = {}
        self._sent: dict[int, list[int]] = {}
        # Whether the actor can step, as far as is known.
        self.is_stepping = False

    def add(self, frames: list[Frame], rows: list[Row], stream: int) -> None:
        """Send frames with the next call."""
        self._frames += frames
        self._rows += rows
        self._streams.append(stream)
        self.is_stepping = True
        self._fill()

    def take(self, number: int, answer: tuple[bytes, bool]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the answers whose turn has come, with the streams that went with their calls."""
        self._answers[number] = answer
        while self._due in self._answers:
            answered, goes_on = self._answers.pop(self._due)
            self.is_stepping = goes_on or self._due < self._last_with_frames or bool(self._frames)
            self._due += 1
            self._fill()
            yield answered, self._sent.pop(self._due - 1)

    def _fill(self) -> None:
        while self.is_stepping and self._next - self._due < MOST_CALLS:
            number, self._next = self._next, self._next + 1
            if self._frames:
                self._last_with_frames = number
            self._sent[number] = self._streams
            frames, rows = self._frames, self._rows
            self._frames, self._rows, self._streams = [], [], []
            self._call(number, frames, rows)
