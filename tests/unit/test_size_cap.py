"""The batch size that memory allows, learned from failures."""

from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.prediction import FIRST_WAIT, MAX_WAIT, STEP_SHARE, SizeCap


def go_well(cap: SizeCap, times: int) -> None:
    for _ in range(times):
        cap.went_well(cap.size)


def test_failed_try_doubles_the_wait() -> None:
    cap = SizeCap(32)
    cap.ran_out(32)
    go_well(cap, FIRST_WAIT)
    cap.ran_out(18)
    assert cap.size == 16
    go_well(cap, 2 * FIRST_WAIT - 1)
    assert cap.size == 16
    go_well(cap, 1)
    assert cap.size == 18


def test_cap_ends_and_starts_again() -> None:
    cap = SizeCap(3)
    cap.ran_out(3)
    cap.ran_out(3)
    # Twice as long after the second failure: from one to two, to three, and until it is believed.
    go_well(cap, 3 * 2 * FIRST_WAIT - 1)
    assert (cap.size, cap.is_watching) == (3, True)
    go_well(cap, 1)
    assert (cap.size, cap.is_watching) == (3, False)
    cap.ran_out(3)
    go_well(cap, 2 * FIRST_WAIT)
    assert cap.size == 3


@given(st.integers(2, 300), st.integers(1, 300))
def test_cap_finds_any_limit(most: int, limit: int) -> None:
    cap = SizeCap(most)
    failures = 0
    for _ in range(20_000):
        if cap.size > limit:
            cap.ran_out(cap.size)
            failures += 1
        else:
            cap.went_well(cap.size)
    reachable = min(most, limit)
    # A step may be too large to get nearer.
    assert cap.size >= reachable - max(1, reachable // STEP_SHARE)
    # Halving down, and then tries that become rare.
    assert failures <= most.bit_length() + 20_000 // MAX_WAIT + MAX_WAIT.bit_length()


def test_new_maximum_applies_before_any_failure() -> None:
    cap = SizeCap(32)
    for most in (64, 8):
        cap.limit(most)
        assert (cap.size, cap.is_watching) == (most, False)


def test_single_too_large_input_keeps_the_cap() -> None:
    cap = SizeCap(32)
    cap.ran_out(32)
    cap.limit(4)
    cap.ran_out(1, is_retry=True)
    assert cap.size == 4
