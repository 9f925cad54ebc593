"""The table of moves, whole: every state meets every event."""

import itertools

import pytest

from fast_batcher._core.lifecycle import MOVES, Event, IllegalMoveError, State, next_state

ALLOWED = {
    ("new", "open"): "opening",
    ("new", "drain"): "draining",
    ("new", "close"): "closed",
    ("opening", "all workers ready"): "open",
    ("opening", "start failed"): "broken",
    ("opening", "restart budget spent"): "broken",
    ("opening", "drain"): "draining",
    ("opening", "close"): "closed",
    ("open", "restart budget spent"): "broken",
    ("open", "drain"): "draining",
    ("open", "close"): "closed",
    ("draining", "close"): "closed",
    ("broken", "worker ready again"): "open",
    ("broken", "open"): "opening",
    ("broken", "drain"): "draining",
    ("broken", "close"): "closed",
    ("closed", "open"): "opening",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_state_knows_every_event_or_refuses_it(state: State, event: Event) -> None:
    target = ALLOWED.get((state.value, event.value))
    if target is None:
        with pytest.raises(IllegalMoveError, match=f"'{state.value}' on '{event.value}'"):
            next_state(state, event)
    else:
        assert next_state(state, event) is State(target)


def test_states_are_the_words_that_users_see() -> None:
    assert [str(state) for state in State] == [
        "new",
        "opening",
        "open",
        "draining",
        "closed",
        "broken",
    ]


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_it_can_be_closed_from_everywhere_at_once(state: State) -> None:
    assert next_state(state, Event.CLOSE) is State.CLOSED


def test_every_state_can_be_reached() -> None:
    reached = {State.NEW}
    while more := {to for (state, _), to in MOVES.items() if state in reached} - reached:
        reached |= more
    assert reached == set(State)
