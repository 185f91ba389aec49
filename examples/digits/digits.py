"""A convolutional network of one's own on scikit-learn's handwritten digits. See
docs/guide/python.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast


class Images:
    """1,797 images of 8 x 8 pixels, which come with scikit-learn. Each fifth one is held out."""

    version = "sklearn-digits-1"

    def __init__(self, held_out: bool) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ModuleNotFoundError("this example needs: pip install scikit-learn") from None
        digits = load_digits()
        indexes = [i for i in range(len(digits.target)) if (i % 5 == 0) is held_out]
        self.images = torch.tensor(digits.images[indexes] / 16, dtype=torch.float32)
        self.digits = torch.tensor(digits.target[indexes])

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"image": self.images[index][None], "digit": self.digits[index]}


class Digits(holdfast.Task):
    """channels: of the first convolution."""

    def __init__(self, channels: int = 16) -> None:
        self.channels = channels

    def model(self) -> nn.Module:
        width = self.channels
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def merge(self, buffer: str) -> Literal["mean", "sum"]:
        """The running statistics of batch normalisation change in each pass."""
        return "sum" if buffer.endswith("num_batches_tracked") else "mean"

    def data(self) -> Images:
        return Images(held_out=False)

    def validation(self) -> Images:
        return Images(held_out=True)

    def loss(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        scores = model(batch["image"])
        if not model.training:  # a validation: how many digits are wrong
            return (scores.argmax(1) != batch["digit"]).sum()
        return F.cross_entropy(scores, batch["digit"], reduction="sum")
