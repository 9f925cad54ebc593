"""Wrong settings of decorated functions, and what is counted as the length of an item."""

from typing import Any

import pytest

from fast_batcher._local.settings import DecoratorSettings, length_of
from fast_batcher.errors import ConfigurationError
from fast_batcher.types import PriorityStrategy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", 2.0),
        ("batch_size", 2**20 + 1),
        ("timeout_ms", -1),
        ("timeout_ms", float("nan")),
        ("timeout_ms", "5"),
        ("timeout_ms", False),
        ("timeout_ms", 1e20),
        ("small_batch_threshold", -1),
        ("max_batch_length", 0),
        ("max_queue_size", 0),
        ("max_queue_size", "many"),
        ("priority_strategy", 2),
        ("isolate_errors", 1),
    ],
)
def test_a_wrong_value_is_named_with_its_parameter(name: str, value: Any) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError) as caught:
        DecoratorSettings(**settings)
    assert str(caught.value).startswith(f"{name}={value!r}")


def test_the_defaults_are_those_of_batched() -> None:
    settings = DecoratorSettings()
    assert (settings.batch_size, settings.timeout_ms, settings.small_batch_threshold) == (32, 5, 8)


@pytest.mark.parametrize(
    ("item", "length"),
    [("abc", 3), ([1, 2], 2), ({"a": [1, 2, 3], "b": [1]}, 3), ({}, 0), (7, 1), (None, 1)],
)
def test_lengths(item: Any, length: int) -> None:
    assert length_of(item) == length


def test_priorities() -> None:
    by_length = DecoratorSettings(priority_strategy=PriorityStrategy.LENGTH)
    assert by_length.priority("four") == -4
    assert DecoratorSettings(priority_strategy=PriorityStrategy.PRIORITY).priority("four") == -1
    assert DecoratorSettings().ranks_above == float("inf")
