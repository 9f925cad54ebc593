"""Explanation of a batcher's recent batches: what limits their size. Pure.

Each batch votes with its requests for one cause: the reason for which it left, and whether others
had to stay behind. What a setting would gain is read from a service model of the same batches, and
of earlier ones of other sizes: the warm-up has measured a single input.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.values import Release
from fast_batcher.stats import Cause, Explanation, number

# A gain below this share of the capacity is within what the service model is off by.
LEAST_GAIN = 0.05
# Load, as a share of the capacity, from which more capacity is worth a change. The workers' busy
# time is no measure of load: adaptive batches are smaller at a lower load, so that the workers are
# always busy at half of the capacity.
HIGH_LOAD = 0.7


class BatchSample(NamedTuple):
    """An answered batch."""

    # Moments: its worker began with it, and answered it.
    began_at: float
    answered_at: float
    size: int
    release: Release
    # Requests that waited on when it left.
    left_waiting: int
    # Seconds that one of its requests had waited when the worker began, 0.0 for a step, whose
    # streams have waited before; and those in the model.
    waited: float
    infer_seconds: float


class Setup(NamedTuple):
    """The settings that matter for an explanation."""

    max_batch_size: int
    num_workers: int
    has_cost_limit: bool
    is_grouped: bool
    is_enabled: bool = True
    # Whether batches are smaller for now because the model ran out of memory.
    is_short_of_memory: bool = False
    # The sizes to which batches are filled, empty if they are not.
    allowed_batch_sizes: tuple[int, ...] = ()
    # Returns the seconds per request in full batches of a size, by what recent requests cost; None
    # without costs.
    seconds_each: Callable[[int], float | None] = lambda _: None


def explain(
    samples: Sequence[BatchSample],
    setup: Setup,
    learned: Sequence[tuple[float, float, float]] = (),
) -> Explanation:
    """Explain recent batches, oldest first, and older ones by what was `learned` from them."""
    if len(samples) < 2:
        return Explanation()
    largest = min([setup.max_batch_size, *setup.allowed_batch_sizes[-1:]])
    setup = setup._replace(max_batch_size=largest)
    began, ended = samples[0].began_at, max(sample.answered_at for sample in samples)
    seconds = max(ended - began, 1e-9)
    requests = sum(sample.size for sample in samples)
    busy = sum(one.answered_at - one.began_at for one in samples) / (seconds * setup.num_workers)
    votes: Counter[Cause] = Counter()
    for sample in samples:
        votes[_find_cause(sample, setup)] += sample.size
    (cause, count), *_ = votes.most_common(1)
    service = _learn(samples, learned, setup.allowed_batch_sizes)
    rate, capacity = requests / seconds, _predict_capacity(setup, service)
    return Explanation(
        batches=len(samples),
        seconds=seconds,
        requests_per_second=rate,
        mean_batch_size=requests / len(samples),
        busy=min(busy, 1.0),
        capacity=capacity,
        cause=cause,
        cause_share=count / requests,
        advice=_advise(cause, samples, setup, service, rate),
    )


def _learn(
    samples: Sequence[BatchSample],
    learned: Sequence[tuple[float, float, float]],
    steps: tuple[int, ...],
) -> ServiceModel:
    """Make a service model of the samples, and of the other sizes that were learned before."""
    service = ServiceModel(steps)
    for sample in samples:
        service.observe(sample.size, sample.answered_at - sample.began_at)
    sampled = service.points()
    # Last, and so with their full weight: nothing newer tells about these sizes.
    for size, median, _ in learned:
        if all(
            (max(size, known) >= 2 * min(size, known) or (steps and size != known))
            and not _contradict((size, median), (known, seconds))
            for known, seconds, _ in sampled
        ):
            service.observe(size, median)
    return service


def _contradict(*points: tuple[float, float]) -> bool:
    """Return whether the larger of two batches is said to take less than half of the time.

    The inputs of the warm-up may be far shorter than those of the requests.
    """
    (_, small), (_, large) = sorted(points)
    return 2 * large < small


def _predict_capacity(setup: Setup, service: ServiceModel) -> float | None:
    """Predict the requests per second with full batches; None if too little was measured."""
    if each := setup.seconds_each(setup.max_batch_size):
        return setup.num_workers / each
    full = service.best_size(setup.max_batch_size)
    sizes = [size for size, _, _ in service.points()]
    # One size alone tells nothing about a batch twice as large.
    if not sizes or (len(sizes) == 1 and full >= 2 * sizes[0]):
        return None
    return setup.num_workers * full / service.median(full)


def _find_cause(sample: BatchSample, setup: Setup) -> Cause:
    """Return the reason for which one batch was no larger."""
    if not setup.is_enabled:
        return "disabled"
    if sample.release is Release.RETRY:
        return "retries"
    if sample.release is Release.FULL:
        return _find_limit(sample, setup)
    if sample.left_waiting and setup.is_grouped:
        return "groups"
    if sample.left_waiting and setup.has_cost_limit:
        return "cost"
    by_release: dict[Release, Cause] = {
        Release.HOLD: "hold",
        Release.WINDOW: "window",
        Release.DEADLINE: "deadline",
    }
    # Requests wait on where a full step answers more per second than the next one.
    is_best = sample.left_waiting and sample.size in setup.allowed_batch_sizes
    return by_release.get(sample.release, "allowed_batch_sizes" if is_best else "arrivals")


def _find_limit(sample: BatchSample, setup: Setup) -> Cause:
    """Return the limit of a batch behind which enough requests for a full one waited."""
    if sample.size >= setup.max_batch_size:
        return "max_batch_size"
    if setup.has_cost_limit:
        return "cost"
    if sample.size in setup.allowed_batch_sizes:
        return "allowed_batch_sizes"
    # The limit was that of a method, or another one until `reconfigure`.
    return "memory" if setup.is_short_of_memory else "max_batch_size"


def _advise(
    cause: Cause,
    samples: Sequence[BatchSample],
    setup: Setup,
    service: ServiceModel,
    rate: float,
) -> str:
    """Return what would change the size of the batches, and what it would gain."""
    if cause not in ("disabled", "retries") and (advice := _advise_step(samples, service)):
        return advice
    if cause == "max_batch_size":
        full = [sample.size for sample in samples if sample.release is Release.FULL]
        if 2 * sum(size < setup.max_batch_size for size in full) > len(full):
            return (
                "most of these batches had a smaller max_batch_size, that of their method, or the "
                "one before a change: set that of the method, or look again after more batches"
            )
        return _advise_size(setup, service, rate)
    if cause == "window":
        requests = sum(one.size for one in samples)
        waited = sum(one.waited * one.size for one in samples) / requests
        return (
            f"policy='adaptive' sends at once where waiting does not pay; requests wait "
            f"{number(1000 * waited)} ms now"
        )
    return {
        "disabled": "enabled=True lets requests share batches",
        "allowed_batch_sizes": "nothing to change: the next larger size answers fewer per second",
        "cost": "a higher max_batch_cost allows larger batches",
        "groups": "fewer different keys of group_by allow larger batches",
        "memory": "the model ran out of memory; larger batches are tried again from time to time",
        "deadline": "deadlines or max_latency force batches to leave early",
        "hold": "nothing to change: the hold ends when more requests are not worth the wait",
        "retries": "requests are tried again after errors or lost workers; see the log",
        "arrivals": "nothing to change: batches hold what arrives while a worker computes",
    }[cause]


def _advise_step(samples: Sequence[BatchSample], service: ServiceModel) -> str:
    """Return the further allowed size that would save most of the time, "" if none saves enough.

    Its time is taken to be on the line between its neighbours' times.
    """
    fill, known = service.fill, [size for size, _, _ in service.points()]
    advice, most = "", LEAST_GAIN * sum(service.median(sample.size) for sample in samples)
    for step in sorted({sample.size for sample in samples} - {*known}) if service.steps else ():
        filled, whole, seconds = fill(step), service.median(step), service.median_between(step)
        if known[0] < step and filled in known:
            sizes = [one.size for one in samples if fill(one.size) == filled and one.size <= step]
            if (saved := len(sizes) * (whole - seconds)) > most:
                span = f"{min(sizes)} to {step}" if min(sizes) < step else f"{step}"
                gain = f"a step at {step} would answer {whole / seconds:.2g} times as many"
                advice, most = f"batches of {span} are filled to {filled:.0f}: {gain}", saved
    return advice


def _advise_size(setup: Setup, service: ServiceModel, rate: float) -> str:
    """Return what a larger `max_batch_size` would gain."""
    full, capacity = setup.max_batch_size, _predict_capacity(setup, service)
    sizes = [size for size, _, _ in service.points()]
    if capacity is not None and rate < HIGH_LOAD * capacity:
        return "nothing to change: the workers have time left"
    each, with_double = map(setup.seconds_each, (full, 2 * full))
    if len(sizes) == 1 and each is None:
        # The warm-up measures one input, and `max_batch_size` of them.
        remedy = "try max_batch_size=2" if full == 1 else "give the model warmup_inputs"
        return (
            f"no other size than {number(sizes[0])} was measured, so what larger batches gain is "
            f"unknown: {remedy}"
        )
    if each is None or with_double is None:
        each, with_double = service.median(full) / full, service.median(2 * full) / (2 * full)
    gain = each / with_double - 1
    if gain < LEAST_GAIN:
        return (
            f"larger batches would not help: one of {2 * full} is predicted to take twice as long; "
            f"num_workers={setup.num_workers + 1} helps if there is a core or GPU for it"
        )
    also = " with an allowed size of as many" if 2 * full > max(service.steps, default=inf) else ""
    return (
        f"max_batch_size={2 * full}{also} is predicted to raise the capacity by {gain:.0%}, if the "
        f"time of a batch goes on as from {number(sizes[0])} to {number(sizes[-1])} requests"
    )
