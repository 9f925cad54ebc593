"""The models of the GPU benchmark. They run in worker processes, and in bare loops.

Each answer carries a part of its input, so an answer of another request is seen.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.faults import KILLS
from benchmarks.gpu.part import SEED
from examples.image_classification.resnet import (
    MEAN,
    STANDARD_DEVIATION,
    classify,
    load_network,
)
from fast_batcher import Collation, InferenceModel, stack

# Width of an attention head, as in BERT.
HEAD = 64
# Token ids are below this number; 0 is the padding.
VOCABULARY, PADDING = 8192, 0
# Positions of the encoder.
LONGEST = 512
# First id, number of tokens, and a number that depends on all of them.
TextAnswer = tuple[int, int, float]


# Mixes the tokens of each text by queries, keys and values (..., length, heads, HEAD).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_padded(mask: Tensor) -> Attention:
    """Return the attention of texts (n, length); `mask` is (n, 1, 1, length)."""

    def attend(*heads: Tensor) -> Tensor:
        query, key, value = [one.transpose(1, 2) for one in heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.transpose(1, 2)

    return attend


def attend_joined(offsets: Tensor) -> Attention:
    """Return the attention of texts that are joined end to end."""
    lengths = offsets.diff().tolist()
    if offsets.is_cuda:
        longest = max(lengths)
        return lambda query, key, value: varlen_attn(  # type: ignore[return-value]
            query, key, value, offsets, offsets, longest, longest
        )

    def attend(*heads: Tensor) -> Tensor:
        mixed = []
        for parts in zip(*[torch.split(one, lengths) for one in heads], strict=True):
            query, key, value = [part.transpose(0, 1)[None] for part in parts]
            one = functional.scaled_dot_product_attention(query, key, value)
            mixed.append(one[0].transpose(0, 1))
        return torch.cat(mixed)

    return attend


class Layer(nn.Module):
    """A layer of a transformer encoder, normalised before each half.

    Args:
        hidden: Width, a multiple of `HEAD`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        """(..., length, hidden) to the same shape."""
        *shape, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(*shape, 3, hidden // HEAD, HEAD)
        x = x + self.out(attend(*heads.unbind(-3)).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A text encoder: token ids (n, length) to one vector per text (n, hidden).

    Args:
        hidden: Width, a multiple of `HEAD`.
        layers: Number of layers.
    """

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, hidden) for n in (VOCABULARY, LONGEST))
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """Encode, and take the mean over the tokens that are no padding."""
        is_token = ids != PADDING
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        attend = attend_padded(is_token[:, None, None, :])
        for layer in self.layers:
            x = layer(x, attend)
        counted = is_token[:, :, None]
        return (x * counted).sum(1) / counted.sum(1)  # type: ignore[no-any-return]

    def encode_joined(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Encode texts that are joined end to end, without padding."""
        lengths = offsets.diff()
        text = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
        positions = torch.arange(len(ids), device=ids.device) - offsets[text]
        x = self.tokens(ids) + self.positions(positions)
        attend = attend_joined(offsets)
        for layer in self.layers:
            x = layer(x, attend)
        sums = x.new_zeros(len(lengths), x.shape[1]).index_add_(0, text, x)
        return sums / lengths[:, None]  # type: ignore[no-any-return]


def make_encoder(device: str, dtype: str, hidden: int, layers: int) -> Encoder:
    """Make an encoder with random weights on a device."""
    torch.manual_seed(SEED)
    # cuDNN plans its attention anew for each shape, which takes longer than the batch.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device(device):
        network = Encoder(hidden, layers)
    return network.to(getattr(torch, dtype)).eval().requires_grad_(False)


class EncoderModel(InferenceModel[NDArray[np.int64], TextAnswer]):
    """The encoder on a batch that is padded to its longest text."""

    def __init__(self, dtype: str, hidden: int, layers: int) -> None:
        self._network = make_encoder(self.device, dtype, hidden, layers)

    @torch.inference_mode()
    def infer(self, inputs: list[NDArray[np.int64]]) -> list[TextAnswer]:
        """Pad, move, compute; `tolist` waits for the device."""
        ids = np.full((len(inputs), max(map(len, inputs))), PADDING, np.int64)
        for row, value in zip(ids, inputs, strict=True):
            row[: len(value)] = value
        scores = self._network(torch.from_numpy(ids).to(self.device))[:, 0].float().tolist()
        return [
            (int(value[0]), len(value), score) for value, score in zip(inputs, scores, strict=True)
        ]

    def warmup_inputs(self) -> list[NDArray[np.int64]]:
        """Return two texts, so that memory and kernels are there before the first request."""
        return [np.ones(length, np.int64) for length in (16, LONGEST // 2)]


class RaggedEncoderModel(InferenceModel[NDArray[np.int64], TextAnswer]):
    """The encoder on texts that are joined end to end."""

    collation = Collation.concatenate(outputs="rows")

    def __init__(self, dtype: str, hidden: int, layers: int) -> None:
        self._network = make_encoder(self.device, dtype, hidden, layers)

    @torch.inference_mode()
    def infer(self, inputs: Any) -> list[TextAnswer]:
        """Move, compute; `tolist` waits for the device."""
        ids, offsets = [torch.from_numpy(one).to(self.device) for one in inputs]
        scores = self._network.encode_joined(ids, offsets)[:, 0].float().tolist()
        firsts, lengths = inputs[0][inputs[1][:-1]].tolist(), np.diff(inputs[1]).tolist()
        return list(zip(firsts, lengths, scores, strict=True))

    def warmup_inputs(self) -> list[NDArray[np.int64]]:
        """Return two texts, so that memory and kernels are there before the first request."""
        return [np.ones(length, np.int64) for length in (16, LONGEST // 2)]


def make_texts(lengths: list[int]) -> list[NDArray[np.int64]]:
    """Draw the ids of texts of these lengths."""
    random = np.random.default_rng(SEED)
    return [random.integers(PADDING + 1, VOCABULARY, length) for length in lengths]


def is_own(value: NDArray[np.int64], answer: TextAnswer) -> bool:
    """Return whether an answer belongs to a text."""
    return answer[:2] == (int(value[0]), len(value))


def normalise(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert pixels (h, w, 3) of 0 to 255 to the input of a network (3, h, w)."""
    values = pixels.astype(np.float32) / np.float32(255)
    values -= np.array(MEAN, np.float32)
    values /= np.array(STANDARD_DEVIATION, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


class Classifier(InferenceModel[Any, tuple[int, float]]):
    """A ResNet on normalised images; answers with the class and the image's first number."""

    def __init__(self, arch: str, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._network = load_network(arch, None).to(self.device, self._dtype)

    def infer(self, inputs: list[Any]) -> list[tuple[int, float]]:
        """Stack, move, compute."""
        batch = torch.from_numpy(stack(inputs))
        firsts = batch[:, 0, 0, 0].tolist()
        images = batch.to(self.device, non_blocking=True)
        images = images.to(self._dtype, memory_format=torch.channels_last)
        _, classes = classify(self._network, images)
        return list(zip(classes.tolist(), firsts, strict=True))


class Staged(Classifier):
    """Normalises in `prepare`."""

    def prepare(self, value: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Normalise an image."""
        return normalise(value)


class Inside(Classifier):
    """Normalises in `infer`, one image after the other."""

    def infer(self, inputs: list[Any]) -> list[tuple[int, float]]:
        """Normalise, then compute."""
        return super().infer([normalise(value) for value in inputs])


class InsideThreads(Classifier):
    """Normalises in `infer`, in a thread per core."""

    def __init__(self, arch: str, dtype: str) -> None:
        super().__init__(arch, dtype)
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def infer(self, inputs: list[Any]) -> list[tuple[int, float]]:
        """Normalise, then compute."""
        return super().infer(list(self._threads.map(normalise, inputs)))


# Bytes that an input of `Hungry` occupies on the device, and the memory that its worker may use:
# there is room for the largest batch below, and for no larger one.
INPUT_BYTES = 64 * 2**20
LARGEST_FIT = 8
MEMORY = (LARGEST_FIT + 1) * INPUT_BYTES


class Hungry(InferenceModel[int, tuple[int, int]]):
    """Runs out of memory with large batches; answers with the input and the size of the batch."""

    def __init__(self) -> None:
        if self.device != "cpu":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(MEMORY / total, self.device)

    def infer(self, inputs: list[int]) -> list[tuple[int, int]]:
        """Occupy memory for each input."""
        if self.device == "cpu":
            if len(inputs) > LARGEST_FIT:
                raise torch.OutOfMemoryError(f"a batch of {len(inputs)} does not fit")
            return [(value, len(inputs)) for value in inputs]
        rows = torch.zeros((len(inputs), INPUT_BYTES), dtype=torch.uint8, device=self.device)
        values = rows[:, 0].long() + torch.tensor(inputs, device=self.device)
        return [(value, len(inputs)) for value in values.tolist()]


class Fragile(InferenceModel[int, tuple[int, int]]):
    """Looks its inputs up in a table; an index out of range breaks the device."""

    def __init__(self) -> None:
        self._table = torch.arange(1000, device=self.device)

    def infer(self, inputs: list[int]) -> list[tuple[int, int]]:
        """Answer each input with itself and the size of the batch."""
        if KILLS in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        found = self._table[torch.tensor(inputs, device=self.device)]
        return [(value, len(inputs)) for value in found.tolist()]
