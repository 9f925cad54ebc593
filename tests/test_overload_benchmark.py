"""Who keeps a target: what is compared, and what is said where somebody lost requests."""

from dataclasses import replace

import pytest

from benchmarks import overload
from benchmarks.models import SIZED
from benchmarks.report import Measurement
from benchmarks.scenarios import Figures
from benchmarks.systems import COMPARED, PEERS, SYSTEMS

PEER = overload.PEERS[0]
REFUSAL = "5 times the capacity, uvloop: p99 of a refusal"


def measured(system: str, load: float, figures: Figures, repetition: int = 0) -> Measurement:
    label = overload.label(load)
    return Measurement(system, label, overload.LOOP, 0, repetition, figures, {})


def judge(runs: list[Measurement], claim: str) -> list[bool | None]:
    found = overload.verdicts(runs, [overload.OURS, PEER], overload.LOOP)
    return [verdict.holds for verdict in found if verdict.claim.startswith(claim)]


def test_all_systems_are_there_and_ours_and_bentoml_have_the_target_of_the_model() -> None:
    target = SIZED[overload.MODEL].target
    assert target == 0.050  # which `open_loop` counts by
    assert SYSTEMS[overload.OURS].settings == {"max_latency": target}
    assert SYSTEMS[PEER].settings == {"max_latency_ms": 1000 * target}
    assert set(overload.PEERS) <= set(SYSTEMS)


def test_choices_of_one_question_are_not_measured_beside_all_others() -> None:
    assert overload.OURS not in COMPARED
    assert PEER not in PEERS
    assert set(PEERS) <= set(COMPARED)


def test_below_capacity_both_percentiles_have_to_be_lower() -> None:
    ours = measured(overload.OURS, 0.5, {"p50_ms": 8.0, "p99_ms": 15.0})
    theirs = measured(PEER, 0.5, {"p50_ms": 9.0, "p99_ms": 14.0})
    assert judge([ours, theirs], "open loop at 50%, uvloop: p50") == [True]
    assert judge([ours, theirs], "open loop at 50%, uvloop: p99") == [False]
    # One has lost so many that its 99th percentile is not there: the other's is lower.
    claim = "open loop at 50%, uvloop: p99"
    our_loss = replace(ours, figures={"p50_ms": 8.0, "lost": 0.1})
    their_loss = replace(theirs, figures={"p50_ms": 9.0, "lost": 0.1})
    assert judge([our_loss, theirs], claim) == [False]
    assert judge([ours, their_loss], claim) == [True]
    assert judge([our_loss, their_loss], claim) == [False]
    # It could not be measured at all.
    assert judge([ours, replace(theirs, figures={}, error="it broke")], claim) == [None]


@pytest.mark.parametrize(("theirs", "holds"), [(1999.0, True), (2001.0, False), (0.0, True)])
def test_above_capacity_more_has_to_be_in_time(theirs: float, holds: bool) -> None:
    runs = [
        measured(overload.OURS, 2.0, {"in_time_per_second": 2000.0}),
        measured(PEER, 2.0, {"in_time_per_second": theirs}),
    ]
    assert judge(runs, "2 times the capacity, uvloop: answers in time") == [holds]
    assert judge(runs, "1.2 times") == [None]


def test_a_refusal_at_five_times_the_capacity_has_to_be_quick() -> None:
    assert judge([measured(overload.OURS, 5.0, {"refusal_p99_ms": 9.0})], REFUSAL) == [True]
    assert judge([measured(overload.OURS, 5.0, {"refusal_p99_ms": 11.0})], REFUSAL) == [False]
    # At twice of it there is no bar.
    assert judge([measured(overload.OURS, 2.0, {"refusal_p99_ms": 9.0})], REFUSAL) == [None]


def test_what_computes_in_the_apps_process_is_compared_with_what_does() -> None:
    mine, theirs = next(iter(overload.HERE.items()))
    assert set(overload.HERE) | set(overload.HERE.values()) <= set(SYSTEMS)
    runs = [
        measured(mine, 0.2, {"p50_ms": 8.0, "p99_ms": 15.0}),
        measured(theirs, 0.2, {"p50_ms": 9.0, "p99_ms": 14.0}),
    ]
    found = overload.verdicts(runs, [overload.OURS, mine, theirs], overload.LOOP)
    judged = {one.claim: one.holds for one in found if mine in one.claim}
    # Below capacity alone, and with nobody else.
    assert len(judged) == 2 * len(overload.LOADS)
    where = "open loop at 20%, uvloop"
    assert judged[f"{where}: p50_ms of {mine} over that of {theirs}"] is True
    assert judged[f"{where}: p99_ms of {mine} over that of {theirs}"] is False
    assert overload.measured(0.8, [overload.OURS, mine]) == [overload.OURS, mine]
    assert overload.measured(1.2, [overload.OURS, mine]) == [overload.OURS]


def test_the_table_compares_with_ours() -> None:
    runs = [
        measured(overload.OURS, 2.0, {"in_time_per_second": 2000.0}),
        measured(PEER, 2.0, {"in_time_per_second": 1000.0}),
    ]
    text = overload.text_of(runs, [overload.OURS, PEER], [overload.LOOP])
    (line,) = [line for line in text.splitlines() if line.startswith(PEER) and "1000" in line]
    assert line.split()[-1] == "0.5"
