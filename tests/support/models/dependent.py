"""A small text model, right or with one of the faults that batches expose."""

from typing import Any, Literal

import torch

from fast_batcher import InferenceModel

Fault = Literal["", "mask", "mean", "norm", "dropout", "order"]


class Encoder(InferenceModel[list[int], Any]):
    """Attention over token ids, then the mean of all tokens."""

    def __init__(self, fault: Fault = "") -> None:
        torch.manual_seed(0)
        self._fault = fault
        self._tokens = torch.nn.Embedding(100, 16)
        self._attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self._norm = torch.nn.BatchNorm1d(16).train(fault == "norm")
        self._dropout = torch.nn.Dropout(0.5).train(fault == "dropout")

    @torch.inference_mode()
    def infer(self, inputs: list[list[int]]) -> list[Any]:
        longest = max(map(len, inputs))
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in inputs])
        is_padding = padded == 0
        mask = None if self._fault == "mask" else is_padding
        x = self._norm(self._tokens(padded).transpose(1, 2)).transpose(1, 2)
        x = x + self._attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        if self._fault == "mean":
            x = x.mean(1)
        else:
            x = x.masked_fill(is_padding[:, :, None], 0).sum(1) / (~is_padding).sum(1)[:, None]
        outputs = list(self._dropout(x))
        if self._fault == "order" and len(outputs) > 1:
            outputs = [*outputs[1:], outputs[0]]
        return outputs
