"""A small recurrent detector of speech, and its `SessionModel`. Runs in a worker.

Its weights are random, from a seed: what it answers means nothing, and has the arithmetic of a real
one. The state of a session is what the network remembers of the frames so far.
"""

import torch
from torch import Tensor, nn

from fast_batcher import SessionModel

# A frame is 20 ms of audio: 16,000 samples a second, of 16 bits each, the low byte first.
FRAME_SAMPLES = 320
FRAME_BYTES = 2 * FRAME_SAMPLES
# About 2,600,000 weights.
LAYERS, WIDTH = 2, 512
WEIGHTS_SEED = 1
# Each magnitude has this much more, so that the logarithm of silence is finite.
SILENCE = 1e-3


class Detector(SessionModel[bytes, float, Tensor]):
    """Tells for each frame the probability that somebody speaks."""

    def __init__(self) -> None:
        # A batch is so small that sharing it among threads takes longer.
        torch.set_num_threads(1)
        torch.manual_seed(WEIGHTS_SEED)
        self._window = torch.hann_window(FRAME_SAMPLES)
        self._network = nn.GRU(FRAME_SAMPLES // 2 + 1, WIDTH, LAYERS).eval()
        self._score = nn.Linear(WIDTH, 1).eval()

    def begin(self) -> Tensor:
        """Return the memory of a session without frames."""
        return torch.zeros(LAYERS, WIDTH)

    @torch.inference_mode()
    def infer(self, inputs: list[bytes], states: list[Tensor]) -> list[float]:
        """Compute the next frames of many sessions, each of `FRAME_BYTES`, and remember them."""
        samples = torch.frombuffer(bytearray(b"".join(inputs)), dtype=torch.int16)
        frames = samples.view(1, len(inputs), FRAME_SAMPLES) / 2**15
        spectra = torch.fft.rfft(frames * self._window).abs().add(SILENCE).log()
        outputs, memories = self._network(spectra, torch.stack(states, 1))
        for state, memory in zip(states, memories.unbind(1), strict=True):
            state.copy_(memory)
        found: list[float] = torch.sigmoid(self._score(outputs[0]))[:, 0].tolist()
        return found

    def warmup_inputs(self) -> list[bytes]:
        """Return a silent frame."""
        return [bytes(FRAME_BYTES)]
