"""Service models: seconds of a batch, learned from batches that ran.

Pure; on the scheduler's thread.

    ServiceModel   by one number, the size of a batch or the sum of its costs
    PaddedModel    by two, the size and the cost of the longest input, to which all are padded

In a `ServiceModel` sizes are put into buckets of powers of two; each bucket tracks the median and
the 95 % quantile of its times by multiplicative steps, which need no history, and which an outlier
moves by one step only. Estimates are read from a line through the buckets: see `_line`.

A compiled model computes only some sizes, and a batch is filled up to the next one. Its times are a
staircase: each allowed size is a bucket, and every size is read at the one to which it is filled.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, frexp, inf, sqrt
from operator import attrgetter, mul
from typing import NamedTuple, Protocol

# The first observations of a bucket are kept, and their plain median is used. With fewer than five
# the result of steps would depend on the start; with more, steps are better than a plain median.
PLAIN = 5
# The quantile behind `high`.
HIGH = 0.95
# A step is a change by this factor's logarithm: large while a bucket is young, small enough then
# that the median of times that scatter by 10 % is within 3 %.
FIRST_STEP, LAST_STEP = 0.08, 0.02
# Steps in one direction after which they double, and how often: a time that has changed 50-fold is
# found within 35 batches. Chance alone makes a run of five in one batch of sixteen.
STEADY_RUN, MOST_DOUBLINGS = 4, 4
# The high quantile falls nineteen times more slowly than it rises: two slow batches among the first
# five of a size, far above all that follow, would be believed for two thousand more. So while a
# bucket is young and its quantile is `FAR` times its median, a run of `QUIET_RUN` below it has
# its steps double too, up to a quarter. Chance alone makes one run of 27 as long where one time in
# twenty is above, one of 850 where one in ten is; and it takes long to rise again, hence the age.
QUIET_RUN, FAR, YOUNG, MOST_QUIET_DOUBLINGS = 64, 2.0, 512, 8
# The weight of a bucket halves after this many batches of other sizes per observation of its own,
# and after LONGEST_HALF_LIFE batches at the latest: 4096 batches of 5 ms are 20 seconds. A size
# observed three times at a bad moment is forgotten within a few hundred batches.
HALF_LIFE_PER_OBSERVATION, LONGEST_HALF_LIFE = 32, 4096
# That of a step. It is tried again about two half-lives later, for less than 1 % of the time.
STEP_HALF_LIFE = 256
# Enough for sizes that differ 2**32-fold. Costs come from the user's function and have no bound.
MOST_BUCKETS = 32
# A line is reused for this many observations of settled buckets: it takes 10 us to compute, and
# they move it by a step or two.
LINE_LIFE = 8


@dataclass(slots=True)
class _Bucket:
    """Times of the sizes above half a power of two up to the power itself."""

    count: int = 0
    # The mean of its sizes; recent ones weigh more.
    size: float = 0.0
    median: float = 0.0
    high: float = 0.0
    # The first times, sorted.
    first: list[float] = field(default_factory=list)
    # Steps of the median in one direction: positive upwards, negative downwards.
    run: int = 0
    # Observations since the last one above `high`.
    quiet: int = 0
    # Number of its last observation, counted over all buckets.
    last_seen: int = 0

    def is_settled(self) -> bool:
        return self.count > 2 * PLAIN and abs(self.run) <= STEADY_RUN

    def observe(self, size: float, seconds: float) -> None:
        count = self.count = self.count + 1
        self.size += (size - self.size) / min(count, 1 / LAST_STEP)
        if count <= PLAIN:
            insort(self.first, seconds)
            self.median = (self.first[(count - 1) // 2] + self.first[count // 2]) / 2
            # The second highest: the highest of five is more often than not above the quantile.
            self.high = max(self.median, self.first[-2] if count > 1 else seconds)
            return
        step = max(LAST_STEP, FIRST_STEP / sqrt(1 + count / 8))
        if seconds == self.median:
            self.run, boost = 0, 1
        else:
            way = 1 if seconds > self.median else -1
            self.run = run = self.run + way if self.run * way > 0 else way
            boost = 1 << min(max(run * way - STEADY_RUN, 0), MOST_DOUBLINGS)
            factor = exp(0.5 * way * step * boost)
            self.median *= factor
            if boost > 1:
                # All times have changed, the long ones too. With its own steps alone, which are
                # nineteen times smaller downwards, the quantile would follow slowly.
                self.high *= factor
        self._move_high(seconds, step)

    def _move_high(self, seconds: float, step: float) -> None:
        if seconds > self.high:
            self.quiet = 0
            self.high *= exp(step * HIGH)
            return
        self.quiet += 1
        boost = 1
        is_doubtful = self.count < YOUNG and self.high > FAR * self.median
        if is_doubtful and self.quiet > QUIET_RUN:
            boost = 1 << min(self.quiet - QUIET_RUN, MOST_QUIET_DOUBLINGS)
        self.high = max(self.median, self.high * exp(-step * (1 - HIGH) * boost))


# A line through sizes and seconds, both rising, and its slopes before and beyond them.
_Line = tuple[list[float], list[float], float, float]


class ServiceModel:
    """Predicts the seconds of a batch from its size (or from its padded cost).

    An observation costs about 6 us, 10 us more at every eighth, and a reading less than 1 us.

    Source: stochastic approximation of quantiles. On a model with a knee and 1 % of its times
    twentyfold, the median was 2.7 % off, a line of least squares 19 %.

    Args:
        steps: The sizes to which batches are filled, rising; empty if none is filled.
    """

    def __init__(self, steps: tuple[int, ...] = ()) -> None:
        self.steps = steps
        self._count = 0
        # The buckets, by the exponent of their sizes, or by their step.
        self._buckets: dict[float, _Bucket] = {}
        # The lines that are read, None when they must be computed again: at the latest with the
        # observation of this number.
        self._next_line = 0
        self._median: _Line | None = None
        self._high: _Line | None = None

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation; before it nothing may be read."""
        return bool(self._buckets)

    def use_steps(self, steps: tuple[int, ...]) -> None:
        """Use other steps from now on, and forget what was learned with the previous ones."""
        self.steps = steps
        self._buckets.clear()
        self._median = self._high = None

    def fill(self, size: float) -> float:
        """Return the size to which a batch is filled; no batch is larger than the last step."""
        at = bisect_left(self.steps, size)
        return self.steps[at] if at < len(self.steps) else size

    def best_size(self, count: int) -> int:
        """Return how many of `count` waiting requests to compute now, all or as many as a step.

        The size with most requests per second is best: the others go with requests that arrive
        meanwhile. All go if the time of their step is unknown.
        """
        if self.fill(count) not in self._buckets:
            return count
        known = [size for size in self.steps if size < count and size in self._buckets]
        # The larger one of two equal sizes is the first.
        return max([count, *reversed(known)], key=lambda size: size / self.median(size))

    def observe(self, size: float, seconds: float) -> None:
        """Learn from a batch that has been answered."""
        if not (0 < seconds < inf and 0 < size < inf):
            return
        size = key = self.fill(size)
        if not self.steps:
            mantissa, key = frexp(size)
            if mantissa == 0.5:  # a power of two is the largest of its bucket
                key -= 1
        self._count += 1
        bucket = self._buckets.get(key)
        if bucket is None or self._count - bucket.last_seen > self._half_life(bucket):
            if bucket is None and len(self._buckets) == MOST_BUCKETS:
                del self._buckets[min(self._buckets, key=lambda key: self._buckets[key].last_seen)]
            bucket = self._buckets[key] = _Bucket()
        bucket.last_seen = self._count
        bucket.observe(size, seconds)
        if not bucket.is_settled() or self._count >= self._next_line:
            self._median = self._high = None
            self._next_line = self._count + LINE_LIFE

    def median(self, size: float) -> float:
        """Return the median seconds of batches of this size; only if `is_known`."""
        return self.median_between(self.fill(size))

    def median_between(self, size: float) -> float:
        """Return the median seconds on the line between steps, for a size that is a mean itself."""
        if self._median is None:
            self._median = self._line(attrgetter("median"))
        return _read(self._median, size)

    def high(self, size: float) -> float:
        """Return the 95 % quantile of the seconds of this size; only if `is_known`."""
        if self._high is None:
            self._high = self._line(attrgetter("high"))
        # The two lines may cross at sizes with few observations.
        return max(_read(self._high, self.fill(size)), self.median(size))

    def points(self) -> list[tuple[float, float, float]]:
        """Return the mean size, the median and the 95 % quantile of each bucket, by size."""
        return sorted((known.size, known.median, known.high) for known in self._buckets.values())

    def _half_life(self, bucket: _Bucket) -> int:
        each = STEP_HALF_LIFE if self.steps else HALF_LIFE_PER_OBSERVATION
        return min(each * bucket.count, LONGEST_HALF_LIFE)

    def _weigh(self, bucket: _Bucket) -> float:
        """Return the weight of a bucket, which decays with its age."""
        return float(0.5 ** ((self._count - bucket.last_seen) / self._half_life(bucket)))

    def _line(self, seconds_of: Callable[[_Bucket], float]) -> _Line:
        """Return a rising line through the buckets, which are added most recent first.

        A larger batch takes no less time. Where two buckets contradict that, the more recent one is
        right: a wrong estimate for a size that no longer occurs must not block. So each bucket is
        clamped between its more recent neighbours. Its weight decays with its age; the rest of the
        weight goes to the line through the others.
        """
        if self.steps:
            return self._stairs(seconds_of)
        sizes: list[float] = []
        times: list[float] = []
        line: _Line = (sizes, times, 0.0, 0.0)
        for bucket in sorted(self._buckets.values(), key=attrgetter("last_seen"), reverse=True):
            size, seconds = bucket.size, seconds_of(bucket)
            at = bisect_left(sizes, size)
            if sizes:
                if at and seconds < times[at - 1]:
                    seconds = times[at - 1]
                if at < len(times) and seconds > times[at]:
                    seconds = times[at]
                others = _read(line, size)
                seconds = others + (seconds - others) * self._weigh(bucket)
            sizes.insert(at, size)
            times.insert(at, seconds)
            line = (sizes, times, *_slopes(sizes, times))
        return line

    def _stairs(self, seconds_of: Callable[[_Bucket], float]) -> _Line:
        """Return the line through the steps, each of which has its own time.

        As its weight decays, a step falls to the one below it: a step that is believed to be long
        must be tried again.
        """
        sizes, times = sorted(self._buckets), list[float]()
        for size in sizes:
            own = seconds_of(self._buckets[size])
            below = min(own, times[-1]) if times else own
            times.append(below + (own - below) * self._weigh(self._buckets[size]))
        return (sizes, times, *_slopes(sizes, times))


def _slopes(sizes: list[float], times: list[float]) -> tuple[float, float]:
    """Return the slopes at both ends, each over at least a doubling of the size if there is one.

    Neighbouring buckets may have nearly equal sizes; the slope between them would be noise.
    """
    last = len(sizes) - 1
    if not last:
        return 0.0, 0.0
    after = min(max(bisect_left(sizes, 2 * sizes[0]), 1), last)
    before = min(max(bisect_right(sizes, sizes[-1] / 2) - 1, 0), last - 1)
    return (
        (times[after] - times[0]) / (sizes[after] - sizes[0]),
        (times[-1] - times[before]) / (sizes[-1] - sizes[before]),
    )


def _read(line: _Line, size: float) -> float:
    """Return the value of the line at this size.

    Beyond the largest and below the smallest size the line is extrapolated. With only one size it
    is level beyond it and proportional below: without evidence a batch has no fixed cost. The
    opposite assumption would make the policy wait for large batches and never see a small one. For
    the same reason the line is at least proportional below the smallest size.
    """
    sizes, times, first_slope, last_slope = line
    at = bisect_left(sizes, size)
    if at == len(sizes):
        return times[-1] + (size - sizes[-1]) * last_slope
    if at == 0:
        proportional = times[0] * size / sizes[0]
        if len(sizes) == 1:
            return proportional
        return max(proportional, times[0] - (sizes[0] - size) * first_slope)
    left, start = sizes[at - 1], times[at - 1]
    return start + (size - left) / (sizes[at] - left) * (times[at] - start)


class Shape(NamedTuple):
    """A batch, or a part of one, by the numbers on which its time may depend."""

    requests: float
    # The highest cost of a request, and the sum of all.
    longest: float
    cost: float


class ShapeModel(Protocol):
    """Predicts the seconds of a batch from its shape."""

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation; before it nothing may be read."""

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a batch that has been answered."""

    def median(self, shape: Shape) -> float:
        """Return the median seconds of such batches; only if `is_known`."""

    def high(self, shape: Shape) -> float:
        """Return the 95 % quantile of the seconds of such batches; only if `is_known`."""


class ScalarModel:
    """A `ServiceModel` of one number of the shape: 0 for its size, 2 for its cost."""

    def __init__(self, service: ServiceModel, number: int) -> None:
        self._service = service
        self._number = number

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation."""
        return self._service.is_known

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a batch that has been answered."""
        self._service.observe(shape[self._number], seconds)

    def median(self, shape: Shape) -> float:
        """Return the median seconds of such batches."""
        return self._service.median(shape[self._number])

    def high(self, shape: Shape) -> float:
        """Return the 95 % quantile of the seconds of such batches."""
        return self._service.high(shape[self._number])


# The observations after which each counts half as much: a change of the model's speed is followed
# within some hundred batches, and 200 batches of noise of 5 % leave an error of 1 %.
FADING = 0.5 ** (1 / 140)
# A time further than this factor from the prediction counts as that far: one batch in a hundred
# that takes five times as long moves little, and a model that became half as fast is found, too.
MOST_SURPRISE = 1.5
# Observations that are taken as they are, before there is a prediction worth comparing with.
UNJUDGED = 12
# The weights are computed again after this many observations, earlier while there are few: it takes
# 30 to 100 us.
WEIGHTS_LIFE = 32
# Rounds of the solver. It starts from the last weights, and most solutions take fewer than ten.
MOST_ROUNDS = 100
# The solver ends when no term changes by more than this share of the seconds.
TOLERANCE = 1e-3
# The order in which the solver explains times: by padded work first, because without evidence a
# batch has no fixed cost (see `_read`).
_ORDER = (2, 0, 1, 3)


class PaddedModel:
    """Predicts the seconds of a padded batch from its size n and the cost L of its longest input.

    The time is a sum of four terms with weights that are not negative, so it rises with both:
    a fixed cost, n, n L (layers that work on each token) and n L L (attention between tokens).
    The weights minimize the squares of the relative errors, older ones weighing less. An
    observation takes 9 us, a reading 0.4 us; memory is constant.

    Source: `python -m benchmarks.simulation --parts padded`. A grid of learned cells, by powers of
    two of n and L, was tried first: its cells see few batches each, and their errors cost the
    packer more than a product n L that is learned well.
    """

    def __init__(self) -> None:
        self._count = 0
        # Costs are measured in this unit, so that the terms are of like size.
        self._unit = 1.0
        # The sums of the normal equations.
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._weights = [0.0] * 4
        # Observations after which the weights are computed again.
        self._next_solution = 0
        self._is_solved = False
        # Observed seconds over predicted ones: their quantiles, and a change of the model's speed,
        # which the weights follow more slowly.
        self._ratios = _Bucket()

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation; before it nothing may be read."""
        return self._count > 0

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a batch that has been answered."""
        size, longest, _ = shape
        if not (0 < seconds < inf and 0 < size < inf and 0 < longest < inf):
            return
        if not self._count:
            self._unit = longest
        self._count += 1
        if self._count > UNJUDGED:
            expected = self._predict(size, longest)
            self._ratios.observe(1.0, seconds / expected)
            seconds = min(max(seconds, expected / MOST_SURPRISE), expected * MOST_SURPRISE)
        fixed = 1.0 / seconds
        each = size * fixed
        linear = each * longest / self._unit
        terms = (fixed, each, linear, linear * longest / self._unit)
        targets = self._targets
        for at, (row, term) in enumerate(zip(self._products, terms, strict=True)):
            for other, factor in enumerate(terms):
                row[other] = FADING * row[other] + term * factor
            targets[at] = FADING * targets[at] + term
        if self._count >= self._next_solution:
            self._is_solved = False
            self._next_solution = self._count + max(1, min(WEIGHTS_LIFE, self._count // 4))

    def median(self, shape: Shape) -> float:
        """Return the median seconds of such batches; only if `is_known`."""
        factor = self._ratios.median if self._ratios.count else 1.0
        return factor * self._predict(shape.requests, shape.longest)

    def high(self, shape: Shape) -> float:
        """Return the 95 % quantile of the seconds of such batches; only if `is_known`."""
        factor = self._ratios.high if self._ratios.count else 1.0
        return factor * self._predict(shape.requests, shape.longest)

    def line(self, longest: float) -> tuple[float, float]:
        """Return the fixed seconds of a batch, and those of each input, at this longest input.

        Before any observation only the fixed ones count, so that batches are as large as they may.
        """
        if not self._is_solved:
            if not self._count:
                return 1.0, 0.0
            self._solve()
        fixed, each, linear, square = self._weights
        length = longest / self._unit
        return fixed, each + length * (linear + length * square)

    def _predict(self, size: float, longest: float) -> float:
        fixed, each = self.line(longest)
        return fixed + size * each

    def _solve(self) -> None:
        """Compute the weights by coordinate descent, none below 0."""
        weights, targets = self._weights, self._targets
        for _ in range(MOST_ROUNDS):
            moved = 0.0
            for at in _ORDER:
                row = self._products[at]
                own = row[at]
                rest = targets[at] - sum(map(mul, row, weights))
                new = max(0.0, weights[at] + rest / own)
                moved = max(moved, abs(new - weights[at]) * sqrt(own))
                weights[at] = new
            if moved < TOLERANCE * sqrt(self._products[0][0]):
                break
        self._is_solved = True
