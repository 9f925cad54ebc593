"""Kinds of models, as an opening meets them: whole batches, and steps. Event loop's thread.

An opening is handed one object of these classes. It has what depends on the kind: the scheduler and
its limits, the records of batches and their explanation, and the orders to end one early.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fast_batcher._core.explanation import Setup, explain
from fast_batcher._core.policy import Policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import PaddedPacker, SummedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.stream_explanation import explain_streams
from fast_batcher._core.stream_scheduler import StreamScheduler
from fast_batcher._core.values import Batch, Limits, Order, most_streams, or_infinite
from fast_batcher._opening.ledger import Ledger
from fast_batcher._parent.worker_handle import WorkerHandle
from fast_batcher._transport.pickling import measure_size
from fast_batcher.settings import Settings
from fast_batcher.stats import Explanation


class BatchKind:
    """The kind of a model that computes whole batches."""

    # Whether callers may get chunks before the whole answer.
    gives_chunks = False
    _make_scheduler: type[Scheduler] = Scheduler

    def __init__(self, ledger: Ledger) -> None:
        self._counters = ledger.counters
        # Records a batch that is sent, and one that was computed.
        self.count_sent: Callable[[int, str], None] = ledger.counters.count_batch
        self.complete: Callable[[float, Batch, float], None] = ledger.complete_batch

    @classmethod
    def make_limits(cls, settings: Settings) -> Limits:
        """Make the limits of the scheduler."""
        derived = {"max_batch_size": settings.batch_limit, "max_queue_size": settings.queue_limit}
        return Limits(**(settings.select(Limits.__annotations__) | derived))

    @classmethod
    def make_scheduler(
        cls, settings: Settings, methods: Sequence[Method], policy: Policy
    ) -> Scheduler:
        """Make the scheduler."""
        return cls._make_scheduler(
            policy,
            cls.make_limits(settings),
            measure_size=measure_size,
            packer=cls.make_packer(settings),
            is_grouped=settings.group_by is not None,
            methods=methods,
        )

    @staticmethod
    def make_packer(settings: Settings) -> PaddedPacker | SummedPacker | None:
        """Make the packer that fills batches up to a cost, None without costs."""
        if settings.cost is None:
            return None
        make = PaddedPacker if settings.cost_is_padded else SummedPacker
        return make(settings.max_batch_cost)

    def explain(self, setup: Setup, scheduler: Scheduler) -> Explanation:
        """Explain the size of the recent batches."""
        learned, sizes = scheduler.service.points(), scheduler.service.steps
        explained = explain(self._counters.list_samples(), setup, learned)
        return replace(explained, service_times=learned, allowed_batch_sizes=sizes)

    def skip(self, worker: WorkerHandle, batch: Batch) -> None:
        """Let a worker not compute a batch, unless it has begun."""
        worker.skip(batch.id)


class StreamKind(BatchKind):
    """The kind of a model that answers in steps: each batch is a stream."""

    gives_chunks = True
    _make_scheduler = StreamScheduler

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        # Its steps are recorded instead.
        self.count_sent = lambda *_: None
        self.complete = lambda *_: None

    @classmethod
    def make_limits(cls, settings: Settings) -> Limits:
        """Make the limits of the scheduler, whose batches have one call each."""
        places = settings.batch_limit
        return replace(
            super().make_limits(settings),
            max_batch_size=1,
            # A worker that is added finds the streams in the queue.
            batches_per_worker=most_streams(places) if settings.most_workers == 1 else places,
            places=places,
            most_stream_cost=or_infinite(settings.max_batch_cost),
        )

    @staticmethod
    def make_packer(settings: Settings) -> None:
        """Make none: the cost limits the streams of a worker."""

    def explain(self, setup: Setup, scheduler: Scheduler) -> Explanation:
        """Explain whether streams wait for places."""
        samples, waits = self._counters.list_samples(), self._counters.streams.waits
        return explain_streams(samples, setup, waits)

    def skip(self, worker: WorkerHandle, batch: Batch) -> None:
        """Let a stream leave its worker."""
        worker.order(Order.LEAVE, batch.id)
