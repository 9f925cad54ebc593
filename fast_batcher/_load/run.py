"""All measurements of a run: closed loops, then open loops at shares of the rate reached."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fast_batcher._load.measurement import Case, LoadError, LoadMeasurement
from fast_batcher._load.report import cases, describe_lost, spread

# Most concurrent requests in an open loop; later ones wait for a connection, and the wait counts.
OPEN_CONNECTIONS = 512
# The repetition of a measurement that does not count.
WARM_UP = -1


@dataclass(frozen=True)
class Loads:
    """The loads that each path is put under."""

    # Closed loops.
    clients: Sequence[int]
    # Open loops: arrivals per second, or shares of the rate that the path reached.
    rates: Sequence[float]
    shares: Sequence[float]
    repetitions: int


def measure_loads(
    paths: Mapping[str, str], loads: Loads, measure: Callable[[Case, int], LoadMeasurement]
) -> list[LoadMeasurement]:
    """Measure all loads of all paths.

    Args:
        paths: By their names in the results.
        loads: The loads. Shares need at least one closed loop.
        measure: Measures a case in a repetition, or in `WARM_UP`.

    Raises:
        LoadError: There are shares, and a path has not answered in the closed loops.
    """
    closed = [Case(name, path, n) for n in loads.clients for name, path in paths.items()]
    if closed:
        for name, path in paths.items():
            measure(Case(name, path, max(loads.clients)), WARM_UP)
    found = measure_in_turn(closed, loads.repetitions, measure)
    open_ = [
        Case(name, path, OPEN_CONNECTIONS, rate)
        for name, path in paths.items()
        for rate in loads.rates
    ]
    open_ += [
        Case(name, path, OPEN_CONNECTIONS, share * find_capacity(found, path), share)
        for name, path in paths.items()
        for share in loads.shares
    ]
    return found + measure_in_turn(open_, loads.repetitions, measure)


def measure_in_turn(
    chosen: Sequence[Case], repetitions: int, measure: Callable[[Case, int], LoadMeasurement]
) -> list[LoadMeasurement]:
    """Measure the cases in turn, in every other repetition backwards.

    What slows the machine meanwhile slows all.
    """
    return [
        measure(case, repetition)
        for repetition in range(repetitions)
        for case in (reversed(chosen) if repetition % 2 else chosen)
    ]


def find_capacity(measurements: Sequence[LoadMeasurement], path: str) -> float:
    """Return the best median rate of a path in a closed loop, per second.

    Raises:
        LoadError: It has no good answer.
    """
    spreads = [
        spread(measurements, case, "requests_per_second")
        for case in cases(measurements)
        if case.path == path
    ]
    capacity = max((s.median for s in spreads if s is not None), default=0.0)
    if not capacity:
        lost = describe_lost(m for m in measurements if m.case.path == path)
        raise LoadError(f"{path} got no successful response: {lost or 'raise --seconds'}")
    return capacity
