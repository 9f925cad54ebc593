"""A policy with a fault, as any other code of ours may have one."""

from fast_batcher._core.policy import GreedyPolicy, Load
from fast_batcher._core.queue import Queue
from fast_batcher._core.values import Release


class FaultyPolicy(GreedyPolicy):
    """Raises in one of its methods, as often as it is told."""

    learns = True
    may_hold = True

    def __init__(self, where: str, times: int = 1) -> None:
        self._where, self._times = where, times
        self.error = IndexError("a fault of ours")

    def _raise_in(self, where: str) -> None:
        if where == self._where and self._times:
            self._times -= 1
            raise self.error

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Send now, or raise."""
        self._raise_in("decide")
        return Release.IDLE

    def arrived(self, now: float, count: int, is_idle: bool) -> None:
        """Learn nothing, or raise."""
        self._raise_in("arrived")

    def batch_done(self, now: float, size: int, load: Load) -> None:
        """Learn nothing, or raise."""
        self._raise_in("batch_done")
