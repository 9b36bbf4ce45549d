"""A small decoder and its data, for train.py: plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2


class Layer(nn.Module):
    """Causal attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[0]
        parts = self.query_key_value(self.attention_norm(hidden)).view(rows, LENGTH, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        # Not scaled_dot_product_attention: on a TPU it is a Pallas kernel, which a virtual TPU can't run.
        scores = query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        earlier = torch.ones(LENGTH, LENGTH, device=hidden.device).tril()
        attended = scores.masked_fill(earlier == 0, -1e9).softmax(3) @ value
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, LENGTH, WIDTH))
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """Predicts each next token. The weights are the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of (rows, LENGTH + 1) tokens."""
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(read) + self.positions(torch.arange(LENGTH, device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))


def make_batch(step: int, rows: int) -> torch.Tensor:
    """Returns (rows, LENGTH + 1) tokens, the same in every process: each token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (rows,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1)
