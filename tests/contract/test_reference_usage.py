"""Programs written for fast_dynamic_batcher work when only their import lines are changed.

The program is the one of its README, word for word but for the imports and what stands there for
the user's own part (the model's body, the type of the input).
"""

import asyncio
import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from models.ordinary import BatchSize
from models.returning import Returns
from waits import Watch

from fast_batcher.dyn_batcher import DynBatcher
from fast_batcher.errors import DynamicBatchIndexError

README_PROGRAM = """\
from typing import Any
from fast_batcher.inference_template import InferenceModel
from fastapi import FastAPI
from pydantic import BaseModel


class YourInputPydanticModel(BaseModel):
   text: str
   repeat: int = 1


class DemoModel(InferenceModel):
   def __init__(self):
       super().__init__()
       # Initiate your ML model here

   def infer(self, inputs: list[Any]) -> list[Any]:
       # Run your inputs as a batch for your model
       ml_output = [[one.text * one.repeat, len(inputs), os.getpid()] for one in inputs]
       return ml_output


from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from fast_batcher.dyn_batcher import DynBatcher


@asynccontextmanager
async def lifespan(app: FastAPI):
   RunVar("_default_thread_limiter").set(CapacityLimiter(16))
   global dyn_batcher
   dyn_batcher = DynBatcher(DemoModel, max_batch_size = 8, max_delay = 0.1)
   yield
   dyn_batcher.stop()

app = FastAPI(lifespan=lifespan)

@app.post("/predict/")
async def predict(
   input_model: YourInputPydanticModel
):
   return await dyn_batcher.process_batched(input_model)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The README's program as a module that the worker can import as well."""
    name = f"readme_program_{os.path.basename(tmp_path)}"
    (tmp_path / f"{name}.py").write_text("import os\n" + README_PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


@pytest.mark.slow
def test_the_program_of_the_readme_serves_batches(module: Any) -> None:
    with TestClient(module.app) as client:
        text, _, pid = client.post("/predict/", json={"text": "ab", "repeat": 2}).json()
        assert text == "abab"
        assert pid != os.getpid()
        with ThreadPoolExecutor(16) as threads:
            answers = list(
                threads.map(
                    lambda number: client.post("/predict/", json={"text": str(number)}).json(),
                    range(64),
                )
            )
        assert [answer[0] for answer in answers] == [str(number) for number in range(64)]
        assert all(1 <= size <= 8 for _, size, _ in answers)
        assert client.post("/predict/", json={"repeat": 1}).status_code == 422
        worker = Watch([pid])
    with worker:
        assert worker.survivors(0.0) == []


# --- the batcher of a synchronous fixture ---------------------------------------------------------


@pytest.fixture
def dyn_batcher() -> Iterator[DynBatcher[Any, Any]]:
    batcher: DynBatcher[Any, Any] = DynBatcher(BatchSize, max_batch_size=8, max_delay=0.1)
    yield batcher
    # By now the loop of the test is closed.
    batcher.stop()
    assert batcher.state == "closed"


@pytest.mark.slow
@pytest.mark.anyio
async def test_async_test_calls_batcher_of_synchronous_fixture(
    dyn_batcher: DynBatcher[Any, Any],
) -> None:
    sizes = await asyncio.gather(*[dyn_batcher.process_batched(number) for number in range(16)])
    assert sizes == [8] * 16


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.anyio
async def test_output_mismatch_error_keeps_its_old_name() -> None:
    batcher: DynBatcher[str, Any] = DynBatcher(Returns, 8, 0.1)
    with pytest.raises(DynamicBatchIndexError, match="2 outputs for 3 inputs") as caught:
        await asyncio.gather(*[batcher.process_batched("fewer") for _ in range(3)])
    assert isinstance(caught.value, IndexError)
    assert caught.value.message == str(caught.value)
    # The others of the gathered calls have their errors as well, and the batcher serves on.
    assert await batcher.process_batched("list") == "list"
    batcher.stop()
