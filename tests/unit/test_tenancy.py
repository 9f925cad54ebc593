"""`Tenancy`: when a host process ends."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.host import LINGER, Tenancy


def test_host_without_clients_ends_after_lingering() -> None:
    assert Tenancy(5.0).ends_at == 5.0 + LINGER


@pytest.mark.parametrize("before", ["", "supervisor ended", "asked to end"])
@pytest.mark.parametrize("how", ["goodbye", "replaced", "vanished"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_last_process_decides(before: str, how: str, when: str) -> None:
    tenancy = Tenancy(0.0)
    for tenant in (1, 2):
        tenancy.joined(tenant)
    if when == "before":
        tell(tenancy, 50.0, before)
    tenancy.vanished(60.0, 1)
    # One that has left is no reason, whatever it says.
    assert tenancy.ends_at == inf
    tell(tenancy, 100.0, how, 2)
    if when == "after":
        tell(tenancy, 100.0, before)
    lingers = how != "goodbye" and not before
    assert tenancy.ends_at == (100.0 + LINGER if lingers else 100.0)


@pytest.mark.parametrize(("age", "seconds"), [(4.0, LINGER - 4.0), (LINGER + 1.0, 0.0)])
def test_host_waits_for_a_successor_from_its_start(age: float, seconds: float) -> None:
    tenancy = Tenancy(0.0)
    tenancy.joined(1)
    tenancy.said_goodbye(20.0, 1, age)
    assert tenancy.ends_at == 20.0 + seconds


def test_the_next_process_keeps_a_host_that_lingers() -> None:
    tenancy = Tenancy(0.0)
    tenancy.joined(1)
    tenancy.vanished(10.0, 1)
    tenancy.joined(2)
    assert tenancy.ends_at == inf
    tenancy.said_goodbye(20.0, 2)
    assert tenancy.ends_at == 20.0


def test_host_ends_at_once_without_possible_clients() -> None:
    for event in ("supervisor ended", "asked to end"):
        tenancy = Tenancy(0.0)
        tell(tenancy, 7.0, event)
        assert tenancy.ends_at == 7.0
        # The end is not put off.
        tell(tenancy, 8.0, event)
        assert tenancy.ends_at == 7.0


def tell(tenancy: Tenancy, now: float, event: str, tenant: int = 0) -> None:
    if event == "joined":
        tenancy.joined(tenant)
    elif event == "goodbye":
        tenancy.said_goodbye(now, tenant)
    elif event == "replaced":
        tenancy.said_goodbye(now, tenant, 0.0)
    elif event == "vanished":
        tenancy.vanished(now, tenant)
    elif event == "supervisor ended":
        tenancy.supervisor_ended(now)
    elif event == "asked to end":
        tenancy.asked_to_end(now)


LEFT = ["goodbye", "replaced", "vanished"]
EVENTS = ["joined", *LEFT, "supervisor ended", "asked to end"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=40))
def test_host_lives_while_it_has_a_process(
    events: list[tuple[str, int]],
) -> None:
    tenancy, tenants, is_final = Tenancy(0.0), set[int](), False
    for now, (event, tenant) in enumerate(events, 1):
        if event in LEFT and tenant not in tenants:
            continue
        tell(tenancy, float(now), event, tenant)
        is_final = is_final or event in ("supervisor ended", "asked to end")
        tenants = tenants | {tenant} if event == "joined" else tenants
        tenants = tenants - {tenant} if event in LEFT else tenants
        if tenants:
            assert tenancy.ends_at == inf
        else:
            assert tenancy.ends_at <= now + LINGER
            assert not is_final or tenancy.ends_at <= now
