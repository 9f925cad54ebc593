"""Expected number of arrivals by the time since an event, learned online. Pure."""

from math import inf

# Points of the curve: a hold ends at one of them. With more points each would have too few
# observations.
POINTS = 12
# A new observation's share of the average: it forgets over about 24 of them.
SHARE = 1 / 24
# Fewer observations are no evidence.
ENOUGH = 4


class ReturnCurve:
    """Average number of arrivals by the time since an event.

    The event is either the end of a batch, with the batch's size, after which most of its callers
    send their next requests; or an arrival at an idle batcher, with size one.
    """

    def __init__(self) -> None:
        # The last event.
        self.last_at = -inf
        self.last_size = 1.0
        # Observations so far.
        self.count = 0
        # Averages: of the arrivals up to the end of each part, and of the sizes.
        self._returns = [0.0] * POINTS
        self._size = 0.0
        # Observations in progress: moment and size of the event, seconds of one part, arrivals in
        # each part.
        self._open: list[tuple[float, float, float, list[int]]] = []

    def begin(self, now: float, horizon: float, size: float) -> None:
        """Start to count the arrivals after an event.

        Args:
            now: The moment of the event.
            horizon: Seconds to observe: the length of the curve.
            size: The size of the event.
        """
        self.close(now)
        self.last_at, self.last_size = now, size
        self._open.append((now, horizon / POINTS, size, [0] * POINTS))

    def arrived(self, now: float, count: int) -> None:
        """Record that `count` requests have arrived together."""
        is_over = False
        for origin, part, _, arrivals in self._open:
            at = int((now - origin) / part)
            if at < POINTS:
                arrivals[at] += count
            else:
                is_over = True
        if is_over:
            self.close(now)

    def close(self, now: float) -> None:
        """Add finished observations to the averages."""
        still_open = []
        for observed in self._open:
            origin, part, size, arrivals = observed
            if int((now - origin) / part) < POINTS:
                still_open.append(observed)
                continue
            self.count += 1
            share = max(SHARE, 1 / self.count)
            self._size += (size - self._size) * share
            so_far = 0
            for at, count in enumerate(arrivals):
                so_far += count
                self._returns[at] += (so_far - self._returns[at]) * share
        self._open = still_open

    def forget_open(self) -> None:
        """Discard observations in progress: arrivals will not be reported for a while."""
        self._open.clear()
        self.last_at = -inf

    def expected(self, since: float, size: float) -> list[float]:
        """Return the expected number of further arrivals until the end of each part.

        Below the average size of events the number is in proportion to `size`, above it the
        average: arrivals that are independent of the events would be overestimated after every
        large one.

        Args:
            since: Time since the event in parts, 0 up to `POINTS`.
            size: The size of the event.

        Returns:
            Rising numbers, one for each part from the present one on. Call it only if `count` is
            above 0.
        """
        first = int(since)
        before = self._returns[first - 1] if first else 0.0
        here = before + (since - first) * (self._returns[first] - before)
        scale = min(size / self._size, 1.0)
        return [(returns - here) * scale for returns in self._returns[first:]]
