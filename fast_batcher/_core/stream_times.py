"""The seconds for which streams keep their places, and the prediction of the next free place. Pure.

Part of the scheduler of a model that answers in steps. `Admission` rejects arrivals by it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from fast_batcher._core.values import Batch
from fast_batcher._core.workers import WorkerSlot, WorkerTable

# Streams whose lengths are kept: the 95 % quantile of 128 is their seventh longest.
MOST_LENGTHS: Final = 128


class StreamTimes:
    """Lengths of the last streams, and predictions from their median and their 95 % quantile.

    Args:
        workers: The workers, with their streams.
        places: Streams that a worker computes at a time; further ones wait there.
    """

    def __init__(self, workers: WorkerTable, places: int) -> None:
        self._workers = workers
        self._places = places
        self._lengths: deque[float] = deque(maxlen=MOST_LENGTHS)

    def stream_leaves(self, now: float, slot: WorkerSlot, batch: Batch) -> None:
        """Learn from a stream that is about to be taken from its worker; the next one joins."""
        batch.began_at = joined_at(batch)
        batch.infer_seconds = now - batch.began_at
        if batch in slot.batches[: self._places]:
            self._lengths.append(batch.infer_seconds)
            if len(slot.batches) > self._places:
                slot.batches[self._places].began_at = now

    @property
    def pace(self) -> tuple[float, int] | None:
        """Seconds between the ends of two streams of a busy worker, and 1; None if unknown."""
        lengths = sorted(self._lengths)
        return (lengths[len(lengths) // 2] / self._places, 1) if lengths else None

    def predict(self, now: float) -> Callable[[int], float]:
        """Return a function from a number of requests to the seconds until one behind has a place.

        A stream is predicted to end at the median length. Past that it ends at the 95 % quantile,
        and past that, or while nothing is known, it goes on for as long as it has run. Requests
        that wait take the places as they become free, each for the median.
        """
        ends: list[float] = []
        ahead = 0
        lengths = sorted(self._lengths) or [0.0]
        median, high = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
        for slot in self._workers.assignable:
            running = slot.batches[: self._places]
            ahead += len(slot.batches) - len(running)
            for batch in running:
                seconds = now - joined_at(batch)
                later = [end - seconds for end in (median, high) if seconds < end]
                ends.append(later[0] if later else seconds)
            if not self._workers.is_full(slot):
                ends += [0.0] * (self._places - len(running))
        ends.sort()

        def seconds_until_place(waiting: int) -> float:
            if not ends:  # no worker is ready
                return 0.0
            rounds, place = divmod(ahead + waiting, len(ends))
            return rounds * median + ends[place]

        return seconds_until_place


def joined_at(batch: Batch) -> float:
    """Return the moment at which a stream has got a place in its worker."""
    return batch.began_at or batch.sent_at
