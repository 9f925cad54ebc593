"""Models that make spans; they run in workers."""

import os
import signal
from contextlib import AbstractContextManager
from typing import Any, Self

from models.base import AtGate, pass_gate
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from fast_batcher import InferenceModel

# Trace id, id of the parent span or None, and whether the span is recorded.
Made = tuple[int, int | None, bool]


def describe(span: Any) -> Made:
    """Describe a span as data."""
    context = span.get_span_context()
    parent = span.parent.span_id if isinstance(span, ReadableSpan) and span.parent else None
    return context.trace_id, parent, span.is_recording()


class MakesSpans(InferenceModel[Any, Made]):
    """Answers each input with the span that it has made for the batch; raises for "bad"."""

    def __init__(self) -> None:
        self._tracer = TracerProvider().get_tracer("model")

    def infer(self, inputs: list[Any]) -> list[Made]:
        with self._tracer.start_as_current_span("model") as span:
            if "bad" in inputs:
                raise ValueError("bad")
            if "deadly" in inputs:
                os.kill(os.getpid(), signal.SIGKILL)
            return [describe(span) for _ in inputs]


class GatedEcho(AtGate):
    """Echoes, but waits at the gate with every batch."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        pass_gate(self._gate)
        return inputs


class BadContext(AbstractContextManager[None]):
    """Raises at one place of its way to a worker and back out of the batch."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _pass(self, where: str) -> None:
        if where == self._where:
            raise ZeroDivisionError(where)

    def __reduce__(self) -> Any:
        self._pass("pickle")
        return BadContext._unpickle, (self._where,)

    @classmethod
    def _unpickle(cls, where: str) -> Self:
        context = cls(where)
        context._pass("unpickle")
        return context

    def __enter__(self) -> None:
        self._pass("enter")

    def __exit__(self, *_: object) -> None:
        self._pass("exit")
