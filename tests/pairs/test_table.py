"""The table of pairs agrees with the constructor and with the calls."""

import asyncio
from typing import Any

import pytest
from models import paired
from pairing.dimensions import DEFAULTS, REFUSED_LATE, Pair, make_options, model_of
from pairing.picture import PICTURE, draw_combinations
from pairing.runs import Run
from pairing.table import find_differences

from fast_batcher import DynBatcher
from fast_batcher.errors import BatcherError
from fast_batcher.testing import BatcherKit


def test_constructor_refuses_what_the_table_says() -> None:
    assert find_differences() == []


def test_picture_of_the_documents_shows_the_table() -> None:
    """If it fails: run `PYTHONPATH=.:tests/support python -m pairing.picture`."""
    assert PICTURE.read_text() == draw_combinations()


@pytest.mark.parametrize(
    "pair", REFUSED_LATE, ids=lambda pair: " ".join(map("=".join, sorted(pair)))
)
def test_call_refuses_what_the_table_says(pair: Pair, tmp_path: Any) -> None:
    """What the constructor cannot know is refused by the call, and not later."""

    async def call() -> None:
        case = DEFAULTS | {"workers": "kit"} | dict(pair)
        batcher: DynBatcher[Any, Any] = DynBatcher(model_of(case), **make_options(case, 0))
        async with batcher:
            value, _ = Run(case, 0, tmp_path).make_input()
            if case["call"] == "stream":
                await batcher.stream(value)
            elif case["call"] == "session":
                batcher.session()
            else:
                await batcher.process_rows(value)

    with BatcherKit(), pytest.raises(BatcherError) as caught:
        asyncio.run(call())
    assert type(caught.value).__name__ == REFUSED_LATE[pair]


def test_every_model_has_a_form_with_sizes() -> None:
    for name in ("Plain", "Methods", "Stages", "Stacked", "Padded", "Ragged"):
        assert hasattr(paired, f"{name}Sized")
