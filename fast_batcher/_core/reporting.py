"""Choice of the API process that reports for all API processes of a host. Pure.

The host sends its state to every API process each second, and each acknowledges it. The process
that reports gets the events of workers and requests, and sets gauges. It reports until it leaves or
stops reading, for example because it is stopped, while another process reads.
"""

from math import inf
from typing import Final

# Seconds after which a process that has not acknowledged a state does not read. States are sent
# each second, so that a stopped process is replaced within four seconds, before Prometheus has
# scraped it often; a shorter limit would replace processes whose event loop is only busy.
ACKNOWLEDGE_LIMIT: Final = 2.5


class Reporting:
    """The API processes that have observers, and which of them reports."""

    def __init__(self) -> None:
        # The moment of the first state that each process has not acknowledged; infinite without
        # one. In the order of joining.
        self._unread_since: dict[int, float] = {}
        # None without a process.
        self.reporter: int | None = None

    def joined(self, tenant: int) -> None:
        """Add an API process; it may have been added before."""
        self._unread_since.setdefault(tenant, inf)

    def left(self, tenant: int) -> None:
        """Remove an API process, which may never have been added."""
        self._unread_since.pop(tenant, None)
        if self.reporter == tenant:
            self.reporter = None

    def state_sent(self, now: float, tenant: int) -> None:
        """Expect the acknowledgement of a state."""
        if tenant in self._unread_since:
            self._unread_since[tenant] = min(self._unread_since[tenant], now)

    def state_read(self, tenant: int) -> None:
        """Note that a process reads."""
        if tenant in self._unread_since:
            self._unread_since[tenant] = inf

    def stalled(self, tenant: int) -> None:
        """Note that a process does not read: too many frames wait for it."""
        if tenant in self._unread_since:
            self._unread_since[tenant] = -inf

    def choose(self, now: float) -> int | None:
        """Keep the reporter, or choose the next one; return it, None without a process."""
        if self.reporter is None or not self._reads(now, self.reporter):
            reading = [one for one in self._unread_since if self._reads(now, one)]
            present = [self.reporter] if self.reporter is not None else [*self._unread_since]
            self.reporter = next(iter(reading or present), None)
        return self.reporter

    def _reads(self, now: float, tenant: int) -> bool:
        return now - self._unread_since[tenant] < ACKNOWLEDGE_LIMIT
