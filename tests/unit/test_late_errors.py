"""Late errors: all are counted, and one a minute is logged."""

from fast_batcher._opening.ledger import LOG_INTERVAL, LateErrors


def test_one_late_error_a_minute_is_logged() -> None:
    errors = LateErrors()
    moments = [5.0, 5.0, 5.0 + LOG_INTERVAL / 2, 5.0 + LOG_INTERVAL, 6.0 + 2 * LOG_INTERVAL]
    logged = [errors.add(now) for now in moments]
    assert logged == [(True, 0), (False, 0), (False, 1), (True, 2), (True, 0)]
    assert errors.count == len(moments)
