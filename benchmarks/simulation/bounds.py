"""Means over seeds and their confidence bounds. No process, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Self

from fast_batcher._load.report import Spread
from fast_batcher.stats import number

# The 95 % quantile of Student's distribution, by degrees of freedom from 1 on. Beyond the table it
# is at most the last value.
STUDENT = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over independent seeds. `low` and `high` are each a bound at 95 % confidence."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Compute it; None for no values, without bounds for one value."""
        if not values:
            return None
        mean, count = fmean(values), len(values)
        if count == 1:
            return cls(mean, -inf, inf)
        quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else STUDENT[-1]
        half = quantile * stdev(values) / sqrt(count)
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{number(self.mean)} ±{number(self.high - self.mean)}"

    @property
    def spread(self) -> Spread:
        """What a verdict compares with its bar."""
        return Spread(self.mean, self.low, self.high)


def percent_over(values: Sequence[float], others: Sequence[float]) -> Estimate | None:
    """By how many percent the values are over the others, seed by seed."""
    return Estimate.of([100 * (v / o - 1) for v, o in zip(values, others, strict=True)])
