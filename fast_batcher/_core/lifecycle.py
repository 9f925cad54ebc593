"""State machine of a batcher, as a table from state and event to the next state. Pure.

A missing key is a bug of this library. `batcher.py` alone changes the state, and logs each change.
"""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """State of a batcher, as `DynBatcher.state` shows it."""

    NEW = "new"  # constructed, nothing started
    OPENING = "opening"  # workers are loading; requests are queued
    OPEN = "open"  # every worker has been ready once
    DRAINING = "draining"  # no new requests; the queue is being finished
    CLOSED = "closed"  # nothing is left; it can be opened again
    BROKEN = "broken"  # no worker can be started for now; every call fails at once


class Event(StrEnum):
    """Cause of a change of state."""

    OPEN = "open"
    ALL_READY = "all workers ready"
    START_FAILED = "start failed"
    GIVEN_UP = "restart budget spent"
    RECOVERED = "worker ready again"
    DRAIN = "drain"
    CLOSE = "close"


MOVES: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, Event.OPEN): State.OPENING,
    (State.NEW, Event.DRAIN): State.DRAINING,
    (State.NEW, Event.CLOSE): State.CLOSED,
    (State.OPENING, Event.ALL_READY): State.OPEN,
    (State.OPENING, Event.START_FAILED): State.BROKEN,
    (State.OPENING, Event.GIVEN_UP): State.BROKEN,
    (State.OPENING, Event.DRAIN): State.DRAINING,
    (State.OPENING, Event.CLOSE): State.CLOSED,
    (State.OPEN, Event.GIVEN_UP): State.BROKEN,
    (State.OPEN, Event.DRAIN): State.DRAINING,
    (State.OPEN, Event.CLOSE): State.CLOSED,
    (State.DRAINING, Event.CLOSE): State.CLOSED,
    (State.BROKEN, Event.RECOVERED): State.OPEN,
    (State.BROKEN, Event.OPEN): State.OPENING,
    (State.BROKEN, Event.DRAIN): State.DRAINING,
    (State.BROKEN, Event.CLOSE): State.CLOSED,
    # An app is started once per test: `with TestClient(app)` runs its lifespan each time.
    (State.CLOSED, Event.OPEN): State.OPENING,
}
