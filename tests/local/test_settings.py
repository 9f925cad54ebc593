"""Wrong settings of decorated functions are refused when the function is decorated."""

from typing import Any

import pytest

from fast_batcher import aio
from fast_batcher.errors import ConfigurationError


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
        ("priority_strategy", "LENGTH"),
        ("isolate_errors", 1),
        ("cache", 7),
        ("padding_side", "top"),
        ("pad_tokens", 3),
        ("pad_token", 3),
        ("outputs", "many"),
    ],
)
def test_a_wrong_value_is_named_with_its_parameter(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        aio.inference.dynamically(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_pad_token_and_pad_tokens_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="pad_token="):
        aio.inference.dynamically(pad_tokens={"a": 1}, pad_token={"a": 2})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timout_ms", ". Did you mean 'timeout_ms'?"),
        ("max_delay", ""),
        ("max_batch_size", ". Did you mean 'batch_size'?"),
        ("max_batch_len", ". Did you mean 'max_batch_length'?"),
        ("padding_sides", ". Did you mean 'padding_side'?"),
        ("colour", ""),
    ],
)
def test_an_unknown_option_gets_the_decorators_nearest_name(name: str, hint: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError) as caught:
        aio.inference.dynamically(**options)
    message = f"dynamically() got an unexpected keyword argument '{name}'{hint}"
    assert str(caught.value) == message
