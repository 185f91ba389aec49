"""A task that reads an image or a recording, and writes its text: docs/guide/images-and-audio.md.

The rows of numbers that `holdfast data prepare` made (patches, or frames of log-mel) come first,
and every position sees them. The tokens of the text follow, and each sees those before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [B, L, D]; mask: [L, L], True where a row may look"""
        size, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(size, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(size, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Model(nn.Module):
    def __init__(self, rows: int, values: int, tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.project = nn.Linear(values, width)
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Embedding(rows + 64, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        """features: [B, R, V] of pixels or log-mel; inputs: [B, S] -> logits [B, S, tokens]"""
        is_pixels = features.dtype == torch.uint8
        features = features.to(self.project.weight.dtype)
        rows = self.project(features / 127.5 - 1 if is_pixels else features)
        x = torch.cat([rows, self.token(inputs)], dim=1)
        order = torch.arange(x.shape[1], device=x.device)
        x = x + self.place(order)
        mask = (order[None] <= order[:, None]) | (order[None] < rows.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x[:, rows.shape[1] :]))
        return logits


class Reader(holdfast.Task):
    """rows, values: of a document's features. tokens: of data.tokenizer, or more."""

    def __init__(self, rows: int, values: int, tokens: int, width: int = 48, depth: int = 2):
        self.shape = (rows, values, tokens, width, depth)

    def model(self) -> nn.Module:
        return Model(*self.shape)

    def loss(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        logits = model(batch["features"], batch["inputs"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")

    def vocabulary(self) -> int:
        return self.shape[2]
