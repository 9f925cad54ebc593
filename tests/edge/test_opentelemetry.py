"""OpenTelemetry traces, with the SDK in this process and in the workers."""

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import pytest
from models.stepped import Counter as Steps
from models.stepped import Plan
from openings import Make, host_of, make, own_directory, pids_of
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode
from tracing_models import BadContext, GatedEcho, MakesSpans
from waits import Gate, one_loop, outcome, until

from fast_batcher import (
    BatcherError,
    DynBatcher,
    InferenceError,
    PoisonRequestError,
    UnsendableValueError,
    aio,
    dynamically,
)
from fast_batcher.observing import BatchDispatched, Observer
from fast_batcher.opentelemetry import OpenTelemetryObserver, instrument

__all__ = ["make", "own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Recording(SpanProcessor):
    """A tracer provider's spans: those that are recorded, and those that have ended."""

    def __init__(self, sampler: Any = ALWAYS_ON) -> None:
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(self)
        self.tracer = self.provider.get_tracer("app")
        self.started = 0
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.started += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of a name, in the order of their ends; none of any name may be open."""
        assert self.started == len(self.ended)
        return [one for one in self.ended if one.name == name]

    async def request(self, batcher: Callable[[Any], Any], value: Any) -> Any:
        """Call within a span of the name "request"."""
        with self.tracer.start_as_current_span("request"):
            return await batcher(value)


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def links_of(span: ReadableSpan) -> list[int]:
    return [one.context.span_id for one in span.links]


def is_own(make: Make) -> bool:
    """Return whether the batchers have no host."""
    return not make.keywords["shared"]  # type: ignore[attr-defined]


def is_failed(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


def times_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


@one_loop
async def test_batch_span_links_requests_and_contains_model_spans(
    make: Make,
) -> None:
    recording = Recording()
    batcher = make(MakesSpans, 4, name="model")
    instrument(batcher, recording.provider)
    async with batcher:
        calls = [recording.request(batcher.process_batched, "fine") for _ in range(4)]
        made = set(await asyncio.gather(*calls))
    (batch,) = recording.named("model batch")
    requests = {id_of(one): one for one in recording.named("request")}
    assert sorted(links_of(batch)) == sorted(requests)
    attributes = dict(batch.attributes or {})
    assert attributes.pop("fast_batcher.batch.release") in ("full", "idle")
    assert attributes == {
        "fast_batcher.model": "model",
        "fast_batcher.worker": 0,
        "fast_batcher.batch.id": 0,
        "fast_batcher.batch.size": 4,
        "fast_batcher.batch.cost": 4.0,
    }
    # With `shared` the batch's span is made after the model's.
    parents = [batch] if is_own(make) else recording.named("request")
    contexts = [context for span in parents if (context := span.get_span_context()) is not None]
    assert made <= {(context.trace_id, context.span_id, True) for context in contexts}
    assert len(made) == 1
    for name in ("queue", "infer"):
        spans = recording.named(name)
        assert sorted(one.parent.span_id for one in spans if one.parent) == sorted(requests)
        assert {tuple(links_of(one)) for one in spans} == {(id_of(batch),) * (name == "infer")}
    for queue, infer in zip(recording.named("queue"), recording.named("infer"), strict=True):
        assert queue.parent == infer.parent
        assert queue.parent is not None
        request = requests[queue.parent.span_id]
        moments = [*times_of(queue), *times_of(infer)]
        assert moments[1] == moments[2]
        assert sorted(moments) == moments
        assert times_of(request)[0] <= moments[0]
        assert moments[3] <= times_of(batch)[1] <= times_of(request)[1]


@one_loop
async def test_stream_span_has_first_chunk_and_number_of_chunks(make: Make) -> None:
    recording = Recording()
    batcher = make(Steps, 4, name="steps", model_args=(0.001,))
    instrument(batcher, recording.provider)

    async def read(plan: Plan, most: int) -> None:
        async with await batcher.stream(plan) as stream:
            async for _ in stream:
                most -= 1
                if not most:
                    return

    async with batcher:
        # They end; fail behind chunks, and before; lose the worker; and are left by the caller.
        for plan in (Plan("a", 3), Plan("e", 9, 1, "end")):
            await recording.request(partial(read, most=9), plan)
        for plan in (Plan("f", 9, 3, "fail"), Plan("j", 9, 0, "join"), Plan("k", 9, 2, "kill")):
            with pytest.raises(BatcherError):
                await recording.request(partial(read, most=9), plan)
        await recording.request(partial(read, most=1), Plan("long", 10**9))
        await until(lambda: sum([one.name == "steps stream" for one in recording.ended]) == 6)
    spans = recording.named("steps stream")
    counts: list[Any] = [(one.attributes or {})["fast_batcher.stream.chunks"] for one in spans]
    *others, left = counts
    assert others == [3, 0, 2, 0, 1]
    assert left >= 1
    assert [is_failed(one) for one in spans] == [False, False, True, True, True, False]
    assert [links_of(one) for one in spans] == [[id_of(one)] for one in recording.named("request")]
    for span, count in zip(spans, counts, strict=True):
        assert [one.name for one in span.events] == ["first chunk"] * bool(count)
        for event in span.events:
            assert times_of(span)[0] < event.timestamp <= times_of(span)[1]
    assert recording.named("steps batch") == []
    assert len(recording.named("infer")) == 4


@one_loop
async def test_failed_and_retried_batches_have_error_spans(make: Make) -> None:
    recording = Recording()
    batcher = make(MakesSpans, 4, name="model", restart_backoff=0.01, max_restarts=None)
    instrument(batcher, recording.provider)
    async with batcher:
        for word, error in (("bad", InferenceError), ("deadly", PoisonRequestError)):
            words = ["fine", word]
            calls = [recording.request(batcher.process_batched, one) for one in words]
            fine, failed = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(failed, error)
            assert isinstance(fine, tuple)
    batches = recording.named("model batch")
    told = [(len(one.links), is_failed(one), one.status.description) for one in batches]
    again = "0 requests failed, 2 are tried again"
    assert told[:3] == [
        (2, True, again),
        (1, False, None),
        (1, True, "1 requests failed, 0 are tried again"),
    ]
    assert told[3] == (2, True, "worker lost")
    assert sorted(told[4:], key=str) == [(1, False, None), (1, True, "worker lost")]
    assert sorted(map(is_failed, recording.named("infer"))) == [False, False, True]


@one_loop
@pytest.mark.parametrize("is_in_span", [True, False])
async def test_a_batch_without_sampled_callers_records_nothing(
    make: Make, is_in_span: bool
) -> None:
    recording = Recording(ParentBased(ALWAYS_OFF))
    batcher = make(MakesSpans, 4)
    instrument(batcher, recording.provider)
    async with batcher:
        process = batcher.process_batched
        call = recording.request(process, "fine") if is_in_span else process("fine")
        _, _, is_recorded = await call
    assert recording.started == 0
    # Without any span of a caller the worker's own sampler decides.
    assert is_recorded is not is_in_span


@one_loop
async def test_batch_links_only_sampled_callers(make: Make) -> None:
    recording = Recording(ParentBased(TraceIdRatioBased(0.5)))
    batcher = make(MakesSpans, 64, name="model")
    instrument(batcher, recording.provider)
    async with batcher:
        calls = [recording.request(batcher.process_batched, "fine") for _ in range(64)]
        made = await asyncio.gather(*calls)
    requests = [id_of(one) for one in recording.named("request")]
    linked = [one for batch in recording.named("model batch") for one in links_of(batch)]
    assert sorted(linked) == sorted(requests)
    assert len(recording.named("infer")) == len(requests) < 64
    assert all(is_recorded for *_, is_recorded in made)


@one_loop
@pytest.mark.parametrize(
    ("end", "value"),
    [("cancel", 1), ("cancel", numpy.zeros(100_000)), ("stop", 1)],
    ids=["small", "large", "stop"],
)
async def test_batch_without_callers_ends_its_span(
    make: Make, gate: Gate, end: str, value: Any
) -> None:
    recording = Recording()
    batcher = make(GatedEcho, 1, model_args=(gate.path,), name="model")
    instrument(batcher, recording.provider)
    async with batcher:
        request = asyncio.create_task(recording.request(batcher.process_batched, value))
        visit = await gate.visit()
        if end == "cancel":
            request.cancel()
            await outcome(request)
            visit.let_on()
            await until(lambda: len(recording.ended) == 2)
        else:
            batcher.stop()
            await outcome(request)
    (batch,) = recording.named("model batch")
    assert batch.status.description == (None if end == "cancel" else "closed")


@one_loop
async def test_context_of_unsent_batch_reaches_no_other_batch(make: Make) -> None:
    recording = Recording()
    batcher = make(MakesSpans, 1, name="model")
    instrument(batcher, recording.provider)
    async with batcher:
        with pytest.raises(UnsendableValueError):
            await recording.request(batcher.process_batched, lambda: None)
        assert (await batcher.process_batched("fine"))[1:] == (None, True)
        _, large, _ = await recording.request(batcher.process_batched, bytes(2_000_000))
    *unsent, sent = recording.named("model batch")
    # An input that cannot be pickled reaches no host.
    assert [one.status.description for one in unsent] in ([], ["not sendable"])
    parents = [sent] if is_own(make) else recording.named("request")
    assert sent.status.description is None
    assert id_of(parents[-1]) == large


@one_loop
@pytest.mark.parametrize("where", ["pickle", "unpickle", "enter", "exit"])
async def test_raising_context_is_logged_once(
    make: Make, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Observer):
        needs_context = True

        def batch_dispatched(self, event: BatchDispatched) -> BadContext:
            return BadContext(where)

    @aio.dynamically(observers=[Bad()])
    def echo(items: list[int]) -> list[int]:
        return items

    async with make(MakesSpans, observers=[Bad()]) as batcher:
        for number in range(2):
            *_, is_recorded = await batcher.process_batched("fine")
            assert is_recorded
            assert await echo(number) == number
    await echo.shutdown()
    logged = [one for one in caplog.records if "an observer" in one.getMessage()]
    # In the worker, and on the function's thread, where nothing is pickled.
    # With `shared` the batch has ended when the observer is called.
    assert len(logged) == is_own(make) + ("pickle" not in where)
    assert all("ZeroDivisionError" in logging.Formatter().format(one) for one in logged)


def numbers_of_spans(items: list[Any]) -> list[Any]:
    if "bad" in items:
        raise ValueError("bad")
    span: Any = trace.get_current_span()
    span.set_attribute("seen", len(items))
    return [id_of(span) for _ in items]


async def numbers_of_spans_on_the_loop(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return numbers_of_spans(items)


@one_loop
@pytest.mark.parametrize("decorator", [dynamically, aio.dynamically])
@pytest.mark.parametrize("function", [numbers_of_spans, numbers_of_spans_on_the_loop])
async def test_decorated_function_runs_in_batch_span(decorator: Any, function: Any) -> None:
    recording = Recording()
    observer = OpenTelemetryObserver(recording.provider)
    decorated = decorator(batch_size=4, observers=[observer], isolate_errors=False)(function)
    is_aio = decorator is aio.dynamically
    process = decorated if is_aio else lambda items: asyncio.to_thread(decorated, items)
    try:
        seen = [(await recording.request(process, ["a", "b"]))[0] for _ in range(2)]
        with pytest.raises(ValueError, match="bad"):
            await recording.request(process, ["bad"])
        assert not trace.get_current_span().get_span_context().is_valid
    finally:
        await decorated.shutdown() if is_aio else await asyncio.to_thread(decorated.shutdown)
    batches = recording.named(f"{function.__name__} batch")
    requests = [[id_of(one)] for one in recording.named("request")]
    assert [links_of(one) for one in batches] == requests
    assert [id_of(one) for one in batches[:2]] == seen
    assert [(one.attributes or {}).get("seen") for one in batches] == [2, 2, None]
    assert [is_failed(one) for one in batches] == [False, False, True]
    # Items of one caller in one batch share its two spans.
    assert len(recording.named("queue")) == len(recording.named("infer")) == 3


@one_loop
async def test_one_successful_batch_links_each_request(make: Make) -> None:
    recording = Recording()
    options: Any = {"max_restarts": None, "restart_backoff": 0.01, "num_workers": 2}
    batcher = make(MakesSpans, 16, max_queue_size=10_000, name="model", **options)
    instrument(batcher, recording.provider)
    chance = random.Random(5)
    missing = 10_000
    async with batcher:

        async def calls() -> None:
            nonlocal missing
            while missing > 0:
                missing -= 1
                with suppress(PoisonRequestError):
                    await recording.request(batcher.process_batched, "fine")
                    continue
                missing += 1

        def is_below(limit: int) -> bool:
            return missing < limit

        async def kill() -> None:
            for _ in range(10):
                # So many requests that workers have answered some since the last death.
                await until(partial(is_below, missing - 500))
                os.kill(chance.choice(pids_of(batcher)), signal.SIGKILL)

        killing = asyncio.create_task(kill())
        await asyncio.gather(*[calls() for _ in range(64)], killing)
    stats = batcher.stats
    batches = recording.named("model batch")
    failed = [one for one in batches if is_failed(one)]
    # A worker may have been killed between two batches.
    assert {one.status.description for one in failed} <= {"worker lost"}
    answered = Counter(one for batch in batches if not is_failed(batch) for one in links_of(batch))
    parents = [one.parent.span_id for one in recording.named("infer") if one.parent]
    assert set(answered.values()) == {1}
    assert len(answered) == stats.completed == 10_000
    assert sorted(answered) == sorted(parents)
    requests = {id_of(one) for one in recording.named("request") if not is_failed(one)}
    assert set(answered) == requests


@one_loop
@pytest.mark.usefixtures("own_directory")
async def test_batch_of_two_processes_links_all_callers() -> None:
    recordings = [Recording(), Recording()]
    # The batch leaves when it is full.
    options: Any = {"policy": "fixed", "max_delay": 1000.0, "timeout": None, "name": "model"}
    batchers = [DynBatcher(MakesSpans, 4, shared=True, **options) for _ in recordings]
    async with batchers[0], batchers[1]:
        for batcher, recording in zip(batchers, recordings, strict=True):
            instrument(batcher, recording.provider)
        calls = [
            recording.request(batcher.process_batched, "fine")
            for batcher, recording in zip(batchers * 2, recordings * 2, strict=True)
        ]
        made = set(await asyncio.gather(*calls))
    spans = [span for recording in recordings for span in recording.ended]
    named = {name: [span for span in spans if span.name == name] for name in SPANS}
    (batch,) = named["model batch"]
    requests = sorted(map(id_of, named["request"]))
    assert sorted(links_of(batch)) == requests
    for name in ("queue", "infer"):
        assert sorted(span.parent.span_id for span in named[name] if span.parent) == requests
    assert {links_of(span)[0] for span in named["infer"]} == {id_of(batch)}
    # Those of the model are children of the first caller's span.
    assert len(made) == 1
    assert {span_id for _, span_id, _ in made} <= {*requests}


SPANS = ("request", "model batch", "queue", "infer")


@one_loop
@pytest.mark.usefixtures("own_directory")
async def test_only_batches_that_end_in_their_host_have_spans(gate: Gate) -> None:
    recording = Recording()
    batcher = DynBatcher(
        GatedEcho, 1, model_args=(gate.path,), name="model", shared=True, restart_backoff=0.01
    )
    instrument(batcher, recording.provider)
    async with batcher:
        request = asyncio.create_task(recording.request(batcher.process_batched, 1))
        await gate.visit()
        os.kill(host_of(batcher), signal.SIGKILL)
        (await gate.visit()).let_on()
        assert await request == 1
    ends = [span.status.description for span in recording.named("model batch")]
    assert ends == [None]
    assert len(recording.named("infer")) == 1
