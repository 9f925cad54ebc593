"""The table of moves."""

import pytest

from fast_batcher._core.values import MOVES, Event, State


@pytest.mark.parametrize("state", State)
def test_allowed_transitions_of_each_state(state: State) -> None:
    """And what may not: a missing move is an error."""
    allowed = {str(event): str(to) for (before, event), to in MOVES.items() if before is state}
    assert (
        allowed
        == {
            "new": {"open": "opening", "drain": "draining", "close": "closed"},
            "opening": {
                "all workers ready": "open",
                "start failed": "broken",
                "restart budget spent": "broken",
                "drain": "draining",
                "close": "closed",
            },
            "open": {"restart budget spent": "broken", "drain": "draining", "close": "closed"},
            "draining": {"close": "closed"},
            "closed": {"open": "opening", "test kit ended": "new"},
            "broken": {
                "worker ready again": "open",
                "open": "opening",
                "drain": "draining",
                "close": "closed",
            },
        }[state]
    )


def test_every_event_leads_somewhere() -> None:
    assert {event for _, event in MOVES} == set(Event)
