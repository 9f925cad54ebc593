"""`Reporting`: which API process of a host reports."""

from fast_batcher._core.host import ACKNOWLEDGE_LIMIT, Reporting

LATE = 10.0 + ACKNOWLEDGE_LIMIT


def make(*tenants: int) -> Reporting:
    reporting = Reporting()
    for tenant in tenants:
        reporting.joined(tenant)
    return reporting


def test_no_reporter_without_a_process() -> None:
    reporting = make()
    reporting.left(1)
    for tell in (reporting.state_read, reporting.stalled):
        tell(1)
    reporting.state_sent(0.0, 1)
    assert reporting.choose(0.0) is None


def test_the_first_process_reports_until_it_leaves() -> None:
    reporting = make(1, 2, 3)
    assert reporting.choose(0.0) == 1
    reporting.left(2)
    assert reporting.choose(0.0) == 1
    reporting.left(1)
    assert reporting.choose(0.0) == 3
    reporting.joined(1)
    assert reporting.choose(0.0) == 3


def test_reporter_that_stops_reading_is_replaced() -> None:
    reporting = make(1, 2)
    assert reporting.choose(9.0) == 1
    for tenant in (1, 2):
        reporting.state_sent(10.0, tenant)
        reporting.state_sent(11.0, tenant)
    reporting.state_read(2)
    assert reporting.choose(LATE - 0.1) == 1
    assert reporting.choose(LATE) == 2
    # It goes on, and the other one keeps the part.
    reporting.state_read(1)
    assert reporting.choose(LATE) == 2


def test_slow_reporter_is_replaced_at_once() -> None:
    reporting = make(1, 2)
    assert reporting.choose(0.0) == 1
    reporting.stalled(1)
    assert reporting.choose(0.0) == 2


def test_the_reporter_stays_while_no_process_reads() -> None:
    reporting = make(1, 2)
    assert reporting.choose(0.0) == 1
    for tenant in (1, 2):
        reporting.state_sent(10.0, tenant)
    assert reporting.choose(LATE) == 1
    reporting.left(1)
    assert reporting.choose(LATE) == 2
