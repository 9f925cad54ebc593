"""How many requests arrive within a while after an event? Learned online. Pure."""

from math import inf

# Points of the curve: a hold ends at one of them. Finer, each would be seen too rarely.
POINTS = 12
# A new observation's share of the average: it forgets over about 24 of them.
SHARE = 1 / 24
# Fewer observations are no evidence.
ENOUGH = 4


class ReturnCurve:
    """Arrivals by the time since an event.

    The event is the end of a batch, whose size is that of the batch: most of its callers come back
    after a pause of their own. Or it is an arrival at an idle system, of size one.
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
        # What is being observed: the moment, the seconds of one part, the size, the arrivals in
        # each part.
        self._open: list[tuple[float, float, float, list[int]]] = []

    def begin(self, now: float, horizon: float, size: float) -> None:
        """An event: observe what comes after it.

        Args:
            now: Its moment.
            horizon: For how long, seconds; all points together.
            size: Of the event.
        """
        self.close(now)
        self.last_at, self.last_size = now, size
        self._open.append((now, horizon / POINTS, size, [0] * POINTS))

    def arrived(self, now: float, count: int) -> None:
        """`count` requests have arrived together."""
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
        """Add to the averages what has been observed to its end."""
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
        """Break off what is being observed: arrivals will not be told for a while."""
        self._open.clear()
        self.last_at = -inf

    def expected(self, since: float, size: float) -> list[float]:
        """How many more are to be expected until the end of each part.

        In proportion to the event's size where that is below the average, and else the average:
        arrivals that have nothing to do with the events would be overrated after every large one.

        Args:
            since: Time since the event in parts, 0 up to `POINTS`.
            size: Of the event.

        Returns:
            By part, from the present one on: rising numbers. Only if `count` is above 0.
        """
        first = int(since)
        before = self._returns[first - 1] if first else 0.0
        here = before + (since - first) * (self._returns[first] - before)
        scale = min(size / self._size, 1.0)
        return [(returns - here) * scale for returns in self._returns[first:]]
