"""Texts of unlike lengths: how they are drawn, counted and measured."""

import asyncio
import statistics

import pytest

from benchmarks import padding
from benchmarks.report import Measurement
from benchmarks.scenarios import Load
from benchmarks.systems import SYSTEMS
from benchmarks.systems.ours_embeddings import MOST_TOKENS, token_counter
from benchmarks.texts import MEDIAN_WORDS, TEXTS_PER_SECOND, WARM_UP_TEXTS, queue_of_texts, text_of


def test_texts_are_the_same_for_the_same_numbers_and_log_normal() -> None:
    texts = [text_of(number, 1) for number in range(1000)]
    assert texts == [text_of(number, 1) for number in range(1000)]
    assert texts != [text_of(number, 2) for number in range(1000)]
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 1
    # The median of a thousand is within a tenth of the distribution's, and one in six is beyond a
    # deviation of the logarithm.
    assert statistics.median(lengths) == pytest.approx(MEDIAN_WORDS, rel=0.15)
    beyond = sum(length > MEDIAN_WORDS * 2.718 for length in lengths)
    assert beyond == pytest.approx(159, abs=50)


def test_tokens_are_counted_as_far_as_the_model_reads() -> None:
    count = token_counter()
    assert count("fox") == 3  # with a start and an end
    assert count("fox " * 10) == 12
    assert count("fox " * 1000) == MOST_TOKENS


def test_all_texts_are_asked_once_by_so_many_callers_and_the_warm_up_does_not_count() -> None:
    asked: list[object] = []
    waiting = most = 0

    async def answer(value: object) -> object:
        nonlocal waiting, most
        asked.append(value)
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return value

    figures = asyncio.run(queue_of_texts(answer, Load("MiniLM", 1, 7, 0.5, seed=3)))
    count = WARM_UP_TEXTS + round(TEXTS_PER_SECOND * 0.5)
    assert asked == [text_of(number, 3) for number in range(count)]
    assert most == 7
    assert figures["requests_per_second"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]


def test_each_budget_is_compared_with_the_order_of_arrival() -> None:
    def measured(system: str, rate: float, p50: float) -> Measurement:
        figures = {"requests_per_second": rate, "p50_ms": p50}
        return Measurement(system, "queue_of_texts", "uvloop", 128, 0, figures, {})

    loose, tight = padding.BY_COST
    runs = [
        measured(padding.PLAIN, 10.0, 3.0),
        measured(loose, 15.0, 3.0),
        measured(tight, 14.0, 3.1),
    ]
    found = [verdict.holds for verdict in padding.verdicts(runs, "uvloop", 128)]
    assert found == [True, True, False, False]
    assert padding.row(runs, loose, "uvloop", 128)[:3] == [loose, "uvloop", 128]
    budgets = [SYSTEMS[name].settings["max_batch_tokens"] for name in padding.BY_COST]
    assert budgets[0] == 32 * MOST_TOKENS > budgets[1]


def test_an_embedding_is_right_if_it_has_unit_length() -> None:
    load = Load("MiniLM", 1, 1, 1.0)
    assert load.is_right([0.6, 0.8])
    assert not load.is_right([0.6, 0.9])
