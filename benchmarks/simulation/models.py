"""The simulated models: how long a batch takes. No process, no clock.

The front end, the pipe and the event loop cost nothing here: only policies are compared.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Model:
    """A batch of n takes `fixed + each * n + knee_each * max(0, n - knee)` seconds."""

    name: str
    fixed: float
    each: float
    max_batch_size: int
    # Seconds within which an answer is worth something, in the parts with a target: about three
    # full batches, so that a request may wait for a running batch and for one before its own.
    target: float
    knee: int = 0
    knee_each: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds that a batch of this size (or padded cost) takes."""
        return self.fixed + self.each * size + self.knee_each * max(0.0, size - self.knee)

    @property
    def capacity(self) -> float:
        """Requests per second on full batches."""
        return self.max_batch_size / self.seconds(self.max_batch_size)


# They stand for a GPU (a batch costs what one request costs, up to a knee), a small model on a GPU
# (half of a batch's time is fixed), and a CPU (nearly nothing is fixed).
MODELS = {
    model.name: model
    for model in (
        Model("gpu", 4e-3, 0.02e-3, 64, target=0.050, knee=16, knee_each=0.23e-3),
        Model("mid", 4e-3, 0.3e-3, 32, target=0.050),
        Model("cpu", 0.5e-3, 2e-3, 16, target=0.100),
    )
}


@dataclass(frozen=True)
class Stairs(Model):
    """A compiled model: a batch is filled up to the next of these sizes, in seconds."""

    steps: tuple[tuple[int, float], ...] = ()

    def seconds(self, size: float) -> float:
        """Seconds of the step to which a batch is filled."""
        return next(seconds for step, seconds in self.steps if step >= size)

    @property
    def capacity(self) -> float:
        """Requests per second at the best of the steps."""
        return max(step / seconds for step, seconds in self.steps)


# Three shapes of stairs: a device that large batches do not fill; times that rise nearly in
# proportion; and a last step that takes far longer than the one before it.
STAIRS = {
    model.name: model
    for model in (
        Stairs(name, 0.0, 0.0, 64, target=0.1, steps=steps)
        for name, steps in (
            ("level", ((1, 4e-3), (8, 4.5e-3), (32, 5e-3), (64, 6e-3))),
            ("steep", ((1, 1e-3), (8, 4e-3), (32, 14e-3), (64, 27e-3))),
            ("cliff", ((1, 4e-3), (8, 5e-3), (32, 6e-3), (64, 16e-3))),
        )
    )
}


@dataclass(frozen=True)
class Encoder:
    """A text encoder: all inputs of a batch are padded to the longest.

    A batch of n texts of L tokens takes fixed + max(least, linear * n * L + square * n * L * L)
    seconds: layers that work on each token, attention between tokens, and a device that small
    batches do not fill.
    """

    name: str
    fixed: float
    linear: float
    square: float
    least: float = 0.0
    max_batch_size: int = 32

    def seconds(self, size: float, longest: float) -> float:
        """Seconds of a batch, without noise."""
        work = size * longest * (self.linear + self.square * longest)
        return self.fixed + max(self.least, work)


# The shapes of encoders, with lengths up to LONGEST tokens. At that length attention takes as long
# as the other layers in "gpu", five times as long in "attention", and no time in "linear".
LONGEST = 512
ENCODERS = {
    encoder.name: encoder
    for encoder in (
        Encoder("gpu", 4e-3, 2e-6, 4e-9, least=6e-3),
        Encoder("large gpu", 8e-3, 2e-5, 2e-8, least=10e-3),
        Encoder("cpu", 2e-3, 4e-5, 8e-8),
        Encoder("attention", 5e-3, 5e-6, 5e-8),
        Encoder("linear", 2e-3, 2e-5, 0.0),
    )
}
# Times scatter by this deviation of their logarithm; this share of batches takes so many times as
# long.
NOISE, OUTLIERS, OUTLIER_FACTOR = 0.05, 0.01, 5.0


class NoisyEncoder:
    """Draws the times of an encoder's batches on one worker.

    Args:
        encoder: Of all batches.
        lengths: Of the requests by their number, over and over.
        seed: Of the noise, which does not depend on the batches.
    """

    def __init__(self, encoder: Encoder, lengths: Sequence[float], seed: int) -> None:
        self._encoder = encoder
        self._lengths = lengths
        self._random = Random(f"noise {seed}")

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        """Seconds that a batch of these requests takes."""
        longest = max([self._lengths[request % len(self._lengths)] for request in requests])
        factor = self._random.lognormvariate(0.0, NOISE)
        if self._random.random() < OUTLIERS:
            factor *= OUTLIER_FACTOR
        return factor * self._encoder.seconds(len(requests), longest)


class Worker:
    """Computes how long each batch takes on the one worker.

    Args:
        model: Of all batches.
        slow_first: How many batches at the start are slow, and by which factor.
        stalls: Moments, rising; the first batch that begins after one of them is slow. Moments and
            not a share of the batches, so that all systems meet the same ones.
        stall_factor: By which factor.
        costs: Of the requests by their number; a batch is padded to its most costly one.
    """

    def __init__(
        self,
        model: Model,
        *,
        slow_first: tuple[int, float] = (0, 1.0),
        stalls: Sequence[float] = (),
        stall_factor: float = 1.0,
        costs: Sequence[float] | None = None,
    ) -> None:
        self._model = model
        self._times = [model.seconds(size) for size in range(model.max_batch_size + 1)]
        self._slow_left, self._slow_factor = slow_first
        self._stalls = stalls
        self._stalls_met = 0
        self._stall_factor = stall_factor
        self._costs = costs

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        """Seconds that a batch of these requests takes if it begins now."""
        if self._costs is None:
            seconds = self._times[len(requests)]
        else:
            most = max([self._costs[request] for request in requests])
            seconds = self._model.seconds(len(requests) * most)
        if self._slow_left:
            self._slow_left -= 1
            seconds *= self._slow_factor
        if self._stalls_met < len(self._stalls) and self._stalls[self._stalls_met] <= now:
            # All stalls since the last batch began slow down this batch alone.
            self._stalls_met = bisect_right(self._stalls, now)
            seconds *= self._stall_factor
        return seconds
