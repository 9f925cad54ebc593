"""A small decoder with attention, and its `SteppedModel`. Runs in a worker.

Its weights are random, from a seed: it writes nonsense with the arithmetic of a real one. Each
stream has a cache of its keys and values; a step pads the caches, and computes one more character
of all streams.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fast_batcher import Done, SteppedModel

# The characters that it reads and writes: those of ASCII that print.
CHARACTERS = "".join(map(chr, range(32, 127)))
# About 515,000 weights.
LAYERS, HEADS, WIDTH = 4, 4, 96
HEAD_WIDTH = WIDTH // HEADS
LONGEST = 512
WEIGHTS_SEED = 1
# At 1 characters are drawn by their probabilities; below, the likelier ones more often.
TEMPERATURE = 0.4


class Prompt(NamedTuple):
    """A request."""

    text: str
    # Characters to write.
    length: int
    # Of the draws: the same prompt gives the same text, whatever streams run beside it.
    seed: int = 0


class Block(nn.Module):
    """A layer: attention to what was before, and two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.linear_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the new keys and values.

        Args:
            x: (streams, new characters, WIDTH).
            cache: Keys and values so far: (streams, 2, HEADS, characters, HEAD_WIDTH).
            mask: True where a new character sees another.
        """
        streams, new, _ = x.shape
        split = self.queries_keys_values(self.attention_norm(x))
        split = split.view(streams, new, 3, HEADS, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        queries, keys_values = split[0], split[1:].transpose(0, 1)
        keys, values = torch.cat([cache, keys_values], 3).unbind(1)
        seen = functional.scaled_dot_product_attention(queries, keys, values, mask)
        x = x + self.attended(seen.transpose(1, 2).reshape(streams, new, WIDTH))
        return x + self.down(functional.gelu(self.up(self.linear_norm(x)))), keys_values


class Network(nn.Module):
    """The layers, from characters to scores of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens: Tensor, lengths: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the next characters, and the new keys and values of all layers.

        Args:
            tokens: (streams, new characters).
            lengths: The characters of each stream in the cache, whose rest is padding.
            cache: (streams, LAYERS, 2, HEADS, longest of `lengths`, HEAD_WIDTH).
        """
        streams, new = tokens.shape
        cached = torch.arange(cache.shape[4]) < lengths[:, None, None]
        before = torch.ones(new, new, dtype=torch.bool).tril()
        mask = torch.cat([cached.expand(-1, new, -1), before.expand(streams, -1, -1)], 2)[:, None]
        x = self.characters(tokens) + self.positions(lengths[:, None] + torch.arange(new))
        added = []
        for layer, block in enumerate(self.blocks):
            x, keys_values = block(x, cache[:, layer], mask)
            added.append(keys_values)
        return self.scores(self.norm(x[:, -1])), torch.stack(added, 1)


class Writing:
    """The state of a stream."""

    def __init__(self, prompt: Prompt) -> None:
        self.tokens = [CHARACTERS.index(character) for character in prompt.text]
        self.left = prompt.length
        self.cache = torch.empty(LAYERS, 2, HEADS, 0, HEAD_WIDTH)
        self.random = torch.Generator().manual_seed(prompt.seed)


class Decoder(SteppedModel[Prompt, str]):
    """Writes one character of each text in a step."""

    def __init__(self) -> None:
        # A step is so small that sharing it among threads takes longer.
        torch.set_num_threads(1)
        torch.manual_seed(WEIGHTS_SEED)
        self._network = Network().eval()

    @torch.inference_mode()
    def join(self, inputs: list[Prompt]) -> list[Writing]:
        """Read prompts, but for their last characters, which the first steps read."""
        states = [Writing(prompt) for prompt in inputs]
        for state in states:
            if len(state.tokens) > 1:
                read = torch.tensor([state.tokens[:-1]])
                _, added = self._network(read, torch.tensor([0]), state.cache[None])
                state.cache = added[0]
        return states

    @torch.inference_mode()
    def step(self, states: list[Writing]) -> list[str | Done[str]]:
        """Write a character of each text."""
        lengths = torch.tensor([state.cache.shape[3] for state in states])
        longest = int(lengths.max())
        padded = [
            functional.pad(state.cache, (0, 0, 0, longest - state.cache.shape[3]))
            for state in states
        ]
        tokens = torch.tensor([state.tokens[-1:] for state in states])
        scores, added = self._network(tokens, lengths, torch.stack(padded))
        return [self._write(*each) for each in zip(states, scores, added, strict=True)]

    def _write(self, state: Writing, scores: Tensor, added: Tensor) -> str | Done[str]:
        state.cache = torch.cat([state.cache, added], 3)
        shares = torch.softmax(scores / TEMPERATURE, 0)
        state.tokens.append(int(torch.multinomial(shares, 1, generator=state.random)))
        state.left -= 1
        character = CHARACTERS[state.tokens[-1]]
        return character if state.left else Done(character)

    def warmup_inputs(self) -> list[Prompt]:
        """Return a short request."""
        return [Prompt("a", 2)]


# For `fast-batcher doctor` and `tune`.
PROMPTS = [Prompt("Once upon a time", length, length) for length in (20, 40, 80, 160)]
