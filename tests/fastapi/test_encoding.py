"""Answers with many numbers: JSON and base64 of arrays, in the worker and over HTTP."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from fast_batcher.encoding import to_base64, to_json
from fast_batcher.fastapi import ArrayResponse

FLOATS = np.array([0.1, -1e-30, 1.0, 1 / 3])


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u8", "bool"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), ()])
def test_numbers_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = FLOATS.astype(dtype)[: math.prod(shape)].reshape(shape)
    found = json.loads(to_json({"row": array}))["row"]
    assert np.array_equal(np.array(found, dtype), array)
    assert np.shape(found) == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_are_written_as_arrays(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.5, -2.0, 3.0]).to(dtype).requires_grad_(dtype.is_floating_point)
    assert json.loads(to_json([tensor, tensor.detach()[1]])) == [tensor.tolist(), tensor[1].item()]


def test_nan_and_infinity_become_null() -> None:
    assert to_json(np.array([np.nan, np.inf, 1.0], "f4")) == b"[null,null,1.0]"


@pytest.mark.parametrize(
    "value", [object(), {"a": 1j}, np.array([1j]), np.ones(2, ">f4"), [{1, 2}]]
)
def test_unserializable_value_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError):
        to_json(value)


@pytest.mark.parametrize(
    "numbers", [[1, 2.5], np.array([1, 2.5]), torch.tensor([1, 2.5]).bfloat16()]
)
def test_base64_is_little_endian_float32(numbers: Any) -> None:
    assert base64.b64decode(to_base64(numbers)) == b"\0\0\x80?\0\0 @"


def test_masked_elements_are_no_numbers() -> None:
    """They hold what was there before they were masked, which nobody shall see."""
    masked = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    found = np.frombuffer(base64.b64decode(to_base64(masked)), "<f4")
    assert [*map(str, found)] == ["1.0", "nan", "3.0"]
    assert to_json(masked) == b"[1,null,3]"


@pytest.mark.parametrize(
    "numbers", [[1j], np.ones(1, "M8[s]"), np.ones(1, "m8[s]"), ["1"], [None], torch.ones(1) * 1j]
)
def test_base64_rejects_non_real_dtypes(numbers: Any) -> None:
    with pytest.raises(TypeError, match="give real numbers"):
        to_base64(numbers)


class Query(BaseModel):
    size: int


class Answer(BaseModel):
    row: list[float]


def test_response_is_sent_unchanged_and_documented() -> None:
    app = FastAPI()

    @app.post("/row", response_model=Answer)
    async def row(query: Query) -> ArrayResponse:
        return ArrayResponse({"row": np.ones(query.size, "f4")})

    @app.post("/bytes", response_model=Answer)
    async def encoded(query: Query) -> ArrayResponse:
        return ArrayResponse(to_json({"row": np.ones(query.size, "f4")}))

    client = TestClient(app)
    for path in ("/row", "/bytes"):
        response = client.post(path, json={"size": 2})
        assert response.json() == {"row": [1.0, 1.0]}
        assert response.headers["content-type"] == "application/json"
    shown = app.openapi()["paths"]["/row"]["post"]["responses"]["200"]["content"]
    assert shown["application/json"]["schema"] == {"$ref": "#/components/schemas/Answer"}
