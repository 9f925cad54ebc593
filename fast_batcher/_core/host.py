"""The life of a host by its API processes, the process that reports, and open calls. Pure."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import inf
from typing import Final

from fast_batcher._core.admission import has_room_in_share
from fast_batcher._core.queue import Deadlines
from fast_batcher._core.values import RETRYING, SENT, Request, Share, settle_open

# Seconds for which a host without an API process waits for the next. A server replaces a crashed
# process within seconds, and the models need not be loaded again.
LINGER: Final = 30.0


class Tenancy:
    """The API processes of a host, which ends when none needs it.

        the last API process ...     the host ends ...
        says goodbye                 at once, or `LINGER` after the start of its successor
        vanishes                     after `LINGER`: the server usually starts another
        never came                   after `LINGER`

    A host that was asked to end (SIGTERM), or whose supervisor has ended, ends with its last API
    process, however that leaves.
    """

    def __init__(self, now: float) -> None:
        self._tenants: set[int] = set()
        self._has_supervisor = True
        self._was_asked_to_end = False
        # The moment at which the host ends while it has no API process.
        self._ends_at = now + LINGER

    @property
    def ends_at(self) -> float:
        """The moment at which the host ends; infinite while it has an API process."""
        return inf if self._tenants else self._ends_at

    def joined(self, tenant: int) -> None:
        """Add an API process."""
        self._tenants.add(tenant)

    def said_goodbye(self, now: float, tenant: int, successor_age: float = inf) -> None:
        """Remove an API process that has closed its batcher.

        Args:
            now: The present.
            tenant: The process.
            successor_age: Seconds since the server has started the successor, which has not joined
                yet; infinite without one.
        """
        self._remove(now, tenant, max(0.0, LINGER - successor_age))

    def vanished(self, now: float, tenant: int) -> None:
        """Remove an API process that has died."""
        self._remove(now, tenant, LINGER)

    def _remove(self, now: float, tenant: int, seconds: float) -> None:
        self._tenants.discard(tenant)
        may_linger = self._has_supervisor and not self._was_asked_to_end
        self._ends_at = now + seconds if may_linger else now

    def supervisor_ended(self, now: float) -> None:
        """Note that no further API process will come."""
        self._has_supervisor = False
        self._ends_at = min(self._ends_at, now)

    def asked_to_end(self, now: float) -> None:
        """End as soon as there is no API process."""
        self._was_asked_to_end = True
        self._ends_at = min(self._ends_at, now)


# Seconds after a deadline for which the host may still answer: it reports an expired request itself
# unless it is stopped or stuck.
GRACE: Final = 0.1
# A request fails after this many hosts died while they had it: it is sent again once.
MOST_LOSSES: Final = 2


class OpenCalls:
    """Requests that an API process has given to its host and that have no outcome, by id.

    The host decides about deadlines and retries, as the scheduler does in a process of its own.
    This object decides what the host cannot: which requests end because the host does not answer,
    and which are sent again because it has died.
    """

    def __init__(self, timeout: float | None, *, idempotent: bool) -> None:
        self._timeout = inf if timeout is None else timeout
        self._idempotent = idempotent
        self._ids = count()
        self._calls = Deadlines()
        # The calls to be sent with the next turn of the loop, or to the next host.
        self.unsent: dict[int, Request] = {}
        # The calls whose inputs wait for room in shared memory, in order of arrival.
        self.crowded: dict[int, Request] = {}
        # The number of requests of each named share.
        self._held: Counter[Share] = Counter()

    def __len__(self) -> int:
        return len(self._calls.requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in order of arrival, but for streams with a chunk."""
        return iter(self._calls.requests.values())

    def add(self, now: float, request: Request) -> None:
        """Add a request that has just arrived, and give it its id."""
        request.id = next(self._ids)
        request.arrival = now
        if not request.has_deadline:
            request.deadline = now + self._timeout
        self._calls.add(request)
        self._count(request, 1)

    def held_by(self, share: Share) -> int:
        """Return the number of requests of a named share."""
        return self._held[share]

    def _count(self, request: Request, change: int) -> None:
        if request.share is not None:
            self._held[request.share] += change
            if not self._held[request.share]:
                del self._held[request.share]

    def may_wait(self, request: Request, most: int, most_bytes: int | None) -> bool:
        """Return whether a request may arrive while others wait for room in shared memory.

        As many may wait here as in the queue of the host, which judges a request once it gets it.
        """
        crowded = self.crowded.values()
        if not crowded:
            return True
        if most_bytes is not None and sum(one.size for one in (request, *crowded)) > most_bytes:
            return False
        if request.share is None:
            return len(crowded) < most
        own = sum(one.share == request.share for one in crowded)
        return has_room_in_share(own, len(crowded), most)

    def find(self, id: int) -> Request | None:
        """Return a request, None if it has ended."""
        return self._calls.requests.get(id)

    def remove(self, id: int) -> Request | None:
        """Remove and return a request, None if it has ended."""
        request = self._calls.remove(id)
        if request is not None:
            self._forget(request)
        return request

    def _forget(self, request: Request) -> None:
        """Forget a request that was removed from the calls."""
        self.unsent.pop(request.id, None)
        self.crowded.pop(request.id, None)
        self._count(request, -1)

    @property
    def next_expiry(self) -> float:
        """Earliest moment at which a request may end without an answer of the host."""
        return self._calls.earliest() + GRACE

    def expire(self, now: float) -> list[Request]:
        """Settle and return the requests that the host should have ended before."""
        expired: list[Request] = []
        for request in self._calls.pop_expired(now, GRACE):
            if request.has_chunks:  # the further deadlines of a stream are the host's affair
                request.deadline = inf
                self._calls.add(request)
            else:
                self._forget(request)
                expired.append(request)
        return settle_open(expired)

    def host_lost(self, *, had_workers: bool = True) -> tuple[list[Request], list[Request]]:
        """Settle the requests that end with a dead host, and note the others to be sent again.

        A host without workers, as far as is known, has not died of a request.

        Returns:
            The requests that must not be computed twice, and those with which two hosts have died.
        """
        again: dict[int, Request] = {}
        failed: list[Request] = []
        poisonous: list[Request] = []
        for request in self:
            if request.phase != SENT:
                continue
            request.losses += had_workers
            if request.has_chunks or request.session or not self._idempotent:
                failed.append(request)
            elif request.losses >= MOST_LOSSES:
                poisonous.append(request)
            else:
                request.phase = RETRYING
                again[request.id] = request
        for request in failed + poisonous:
            self.remove(request.id)
        self.unsent = again | self.unsent
        return settle_open(failed), settle_open(poisonous)

    def take_all(self) -> list[Request]:
        """Remove, settle and return every request."""
        left, self._calls = [*self], Deadlines()
        self.unsent.clear()
        self.crowded.clear()
        self._held.clear()
        return settle_open(left)


# Seconds after which a process that has not acknowledged a state does not read. States are sent
# each second, so that a stopped process is replaced within four seconds, before Prometheus has
# scraped it often; a shorter limit would replace processes whose event loop is only busy.
ACKNOWLEDGE_LIMIT: Final = 2.5


class Reporting:
    """The API processes that have observers, and which of them reports.

    The host sends its state to every API process each second, and each acknowledges it. The process
    that reports gets the events of workers and requests, and sets gauges. It reports until it
    leaves or stops reading, for example because it is stopped, while another process reads.
    """

    def __init__(self) -> None:
        # The moment of the first state that each process has not acknowledged; infinite without
        # one. In the order of joining.
        self._unread_since: dict[int, float] = {}
        # The process that reports; None without a process.
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
            reading = [tenant for tenant in self._unread_since if self._reads(now, tenant)]
            present = [self.reporter] if self.reporter is not None else [*self._unread_since]
            self.reporter = next(iter(reading or present), None)
        return self.reporter

    def _reads(self, now: float, tenant: int) -> bool:
        return now - self._unread_since[tenant] < ACKNOWLEDGE_LIMIT
