"""How long does a batch of n take? Learned from batches that ran. Pure; on the scheduler's thread.

Sizes are put into buckets of powers of two; each bucket tracks the median and the 95 % quantile of
its times by multiplicative steps, which need no history and which one outlier moves by one step.
What is read is a line through the buckets: see `_line`.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, frexp, inf, sqrt
from operator import attrgetter

# Observations of a bucket that are kept as they are; from five on the steps are better than a plain
# median of so few, and up to then they would depend on where they started.
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
# Half the weight of what a bucket knows is gone after this many batches of other sizes for each
# time that it was seen, and never later than after the second: 4096 batches of 5 ms are 20 seconds.
# What was seen three times at a bad moment is forgotten within a few hundred.
HALF_LIFE_PER_OBSERVATION, LONGEST_HALF_LIFE = 32, 4096
# Sizes that differ 2**32-fold; costs are whatever the user's function says.
MOST_BUCKETS = 32
# A line serves for this many observations of buckets that are settled: it costs 10 us to work out,
# and they move it by a step or two.
LINE_LIFE = 8


@dataclass(slots=True)
class _Bucket:
    """Times of the sizes above half a power of two up to the power itself."""

    count: int = 0
    # The mean of its sizes, the recent ones above all.
    size: float = 0.0
    median: float = 0.0
    high: float = 0.0
    # The first times, sorted.
    first: list[float] = field(default_factory=list)
    # Steps of the median in one direction: positive upwards, negative downwards.
    run: int = 0
    # Times since the last one above `high`.
    quiet: int = 0
    # The number of the observation that was its last, among those of all buckets.
    last_seen: int = 0

    def is_settled(self) -> bool:
        return self.count > 2 * PLAIN and abs(self.run) <= STEADY_RUN

    def half_life(self) -> int:
        return min(HALF_LIFE_PER_OBSERVATION * self.count, LONGEST_HALF_LIFE)

    def observe(self, size: float, seconds: float) -> None:
        count = self.count = self.count + 1
        self.size += (size - self.size) / min(count, 1 / LAST_STEP)
        if count <= PLAIN:
            insort(self.first, seconds)
            self.median = (self.first[(count - 1) // 2] + self.first[count // 2]) / 2
            # The highest but one: the highest of five is more often than not above the quantile.
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
                # All times have changed, the long ones too. By its own steps alone, which are as
                # many times smaller downwards as they are rarer upwards, it would take long.
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
    """Seconds that a batch takes, as a function of its size (or of its padded cost).

    An observation costs about 6 us, 10 us more at every eighth, and a reading less than 1 us.

    Source: stochastic approximation of quantiles. On a model with a knee and 1 % of its times
    twentyfold, the median was 2.7 % off, a line of least squares 19 %.
    """

    def __init__(self) -> None:
        self._count = 0
        self._buckets: dict[int, _Bucket] = {}
        # The lines that are read, None when they have to be computed again, which is at the latest
        # with this observation.
        self._next_line = 0
        self._median: _Line | None = None
        self._high: _Line | None = None

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation; before it nothing may be read."""
        return bool(self._buckets)

    def observe(self, size: float, seconds: float) -> None:
        """Learn from a batch that has been answered.

        Args:
            size: Its requests or its padded cost; above 0.
            seconds: From the moment at which the worker could begin with it to its answer, as the
                parent saw it. What is not a positive finite number of either is ignored.
        """
        if not (0 < seconds < inf and 0 < size < inf):
            return
        mantissa, exponent = frexp(size)
        if mantissa == 0.5:  # a power of two is the largest of its bucket
            exponent -= 1
        self._count += 1
        bucket = self._buckets.get(exponent)
        if bucket is None or self._count - bucket.last_seen > bucket.half_life():
            bucket = self._add_bucket(exponent)
        bucket.last_seen = self._count
        bucket.observe(size, seconds)
        if not bucket.is_settled() or self._count >= self._next_line:
            self._median = self._high = None
            self._next_line = self._count + LINE_LIFE

    def median(self, size: float) -> float:
        """The seconds that half of the batches of this size stay below; only if `is_known`."""
        if self._median is None:
            self._median = self._line(attrgetter("median"))
        return _read(self._median, size)

    def high(self, size: float) -> float:
        """The seconds that 95 % of the batches of this size stay below; only if `is_known`."""
        if self._high is None:
            self._high = self._line(attrgetter("high"))
        # Where little has been seen, the two lines may cross.
        return max(_read(self._high, size), self.median(size))

    def _line(self, seconds_of: Callable[[_Bucket], float]) -> _Line:
        """A rising line through what the buckets know, those first that were seen last.

        A larger batch takes no less time, and where two buckets contradict that, the one that was
        seen last is right: a wrong belief about a size that no longer occurs must not stand in the
        way. So each bucket is put between its neighbours that were seen after it. And what it says
        weighs the less the longer ago that was; the rest is what the others say of its size.
        """
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
                weight = 0.5 ** ((self._count - bucket.last_seen) / bucket.half_life())
                seconds = others + (seconds - others) * weight
            sizes.insert(at, size)
            times.insert(at, seconds)
            line = (sizes, times, *_slopes(sizes, times))
        return line

    def _add_bucket(self, exponent: int) -> _Bucket:
        if exponent not in self._buckets and len(self._buckets) == MOST_BUCKETS:
            del self._buckets[min(self._buckets, key=lambda key: self._buckets[key].last_seen)]
        bucket = self._buckets[exponent] = _Bucket()
        return bucket


def _slopes(sizes: list[float], times: list[float]) -> tuple[float, float]:
    """Seconds per unit of size at both ends, each over at least a doubling if there is one.

    Neighbouring buckets may have nearly the same size, and then noise would be all of the slope.
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
    """The line at this size.

    Beyond the largest and below the smallest size it goes on as before. With only one size it is
    level beyond it and proportional below: what has not been seen is no evidence that a batch costs
    anything by itself, and to believe the opposite would make the policy wait for large batches and
    never see a small one. Proportional is also the least that it is below the smallest size.
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
