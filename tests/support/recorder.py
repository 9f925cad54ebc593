"""An observer that keeps what it is told, and callers that ask again and again."""

import asyncio
from collections import Counter
from contextvars import ContextVar
from typing import Any

from fast_batcher import DynBatcher
from fast_batcher.observing import BatchAnswered, Observer, RequestEnded, WorkerChanged

caller: ContextVar[str] = ContextVar("caller", default="nobody")


class Recorder(Observer):
    """Keeps every event, and the context variable that it was told in."""

    def __init__(self, *, needs_context: bool = False) -> None:
        self.needs_context = needs_context
        self.events: list[Any] = []
        self.seen: set[str] = set()

    def _keep(self, event: Any) -> None:
        self.events.append(event)
        self.seen.add(caller.get())

    batch_answered = request_ended = worker_changed = collection_paused = _keep

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def answered(self) -> list[Any]:
        return [one for batch in self.of(BatchAnswered) for one in batch.requests]

    def outcomes(self) -> Counter[str]:
        return Counter([one.outcome for one in (*self.answered, *self.of(RequestEnded))])

    def workers(self, change: str) -> list[int]:
        """The workers that have changed so, in order."""
        return [one.worker for one in self.of(WorkerChanged) if one.change == change]


class Load:
    """Callers that ask again as soon as they are answered."""

    def __init__(self, batcher: DynBatcher[Any, Any], callers: int = 8) -> None:
        self.batcher = batcher
        self.answers: Counter[Any] = Counter()
        self.fewest_ready = batcher.stats.workers_ready
        self._is_over = False
        self._tasks = [asyncio.create_task(self._call()) for _ in range(callers)]

    async def _call(self) -> None:
        while not self._is_over:
            answer = await self.batcher.process_batched(None)
            # Of a model with versions: the version, and not the process.
            self.answers[answer[0] if isinstance(answer, tuple) else answer] += 1
            self.fewest_ready = min(self.fewest_ready, self.batcher.stats.workers_ready)

    async def end(self) -> None:
        """End; raises the first error of a caller."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
