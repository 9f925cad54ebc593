"""Allocation of ranges of a file: no overlap, and no leak."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fast_batcher._shared_memory.ranges import ALIGNMENT, PAGE, Ranges, lay_out, round_up

SIZE = 64 * PAGE


class Model(RuleBasedStateMachine):
    """Takes and gives back at random, and keeps a map of the pages."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(SIZE)
        # Who has each page.
        self.pages: list[int | None] = [None] * (SIZE // PAGE)

    def owners(self) -> list[int]:
        return sorted({owner for owner in self.pages if owner is not None})

    @rule(length=st.integers(1, SIZE // 2))
    def take(self, length: int) -> None:
        start = self.ranges.take(length)
        count = round_up(length) // PAGE
        if start is None:
            # No run of free pages is long enough, wherever it begins.
            runs = [self.pages[at : at + count] for at in range(len(self.pages) - count + 1)]
            assert not [run for run in runs if run == [None] * count]
            return
        first = start // PAGE
        assert start % PAGE == 0
        assert self.pages[first : first + count] == [None] * count
        self.pages[first : first + count] = [start] * count

    @rule(choice=st.randoms(use_true_random=False))
    def give_back(self, choice: Any) -> None:
        if self.owners():
            owner = choice.choice(self.owners())
            self.ranges.give_back(owner)
            self.pages = [None if page == owner else page for page in self.pages]

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, SIZE // PAGE))
    def divide(self, choice: Any, count: int) -> None:
        if self.owners():
            owner = choice.choice(self.owners())
            if count < self.pages.count(owner):
                first = owner // PAGE + count
                start = self.ranges.divide(owner, count * PAGE)
                assert start == first * PAGE
                for at in range(first, len(self.pages)):
                    if self.pages[at] == owner:
                        self.pages[at] = start

    @rule()
    def forget_peak(self) -> None:
        assert self.ranges.forget_peak() >= self.end()
        assert self.ranges.peak == self.end()

    def end(self) -> int:
        return (
            max((at + 1 for at, page in enumerate(self.pages) if page is not None), default=0)
            * PAGE
        )

    @invariant()
    def it_knows_what_is_taken(self) -> None:
        assert self.ranges.count == len(self.owners())
        taken = sum(page is not None for page in self.pages)
        assert self.ranges.taken_bytes == taken * PAGE
        assert self.ranges.peak >= self.end()

    def teardown(self) -> None:
        for owner in self.owners():
            self.ranges.give_back(owner)
        assert self.ranges.take(SIZE) == 0


TestRanges = pytest.mark.slow(Model.TestCase)


@given(st.integers(1, 2**40))
def test_range_exceeds_request_by_an_eighth_at_most(length: int) -> None:
    rounded = round_up(length)
    assert rounded % PAGE == 0
    assert 0 <= rounded - length < max(PAGE, length / 8 + 1)
    assert round_up(rounded) == rounded


def test_reused_ranges_stay_at_the_front() -> None:
    ranges = Ranges(SIZE)
    first, second = ranges.take(PAGE), ranges.take(PAGE)
    assert (first, second) == (0, PAGE)
    ranges.give_back(0)
    assert ranges.take(PAGE) == 0
    assert ranges.peak == 2 * PAGE


def test_ranges_begin_at_pages() -> None:
    ranges = Ranges(SIZE)
    assert ranges.take(2 * PAGE) == 0
    assert ranges.divide(0, 100) == 100
    ranges.give_back(100)
    assert ranges.take(PAGE) == PAGE
    ranges.give_back(PAGE)
    ranges.give_back(0)
    assert ranges.take(SIZE) == 0


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_buffers_lie_one_behind_the_other_and_aligned(sizes: list[int]) -> None:
    offsets, length = lay_out(sizes)
    ends = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    for offset, end in zip(offsets, ends, strict=False):
        assert 0 <= offset - end < ALIGNMENT
    assert length == ends[-1]
