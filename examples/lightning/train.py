"""A LightningModule on Holdfast: which of three spirals does a point lie on? See
docs/guide/python.md.

pip install holdfast[lightning]
holdfast run train.py --workers 2
"""

import math

import lightning
import torch
import torch.nn.functional as F
from torch import nn

from holdfast.adapters import lightning as adapter


class Spirals(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.SiLU(),
            nn.Linear(64, 3),
        )

    def training_step(self, batch, batch_idx):
        points, arms = batch
        return F.cross_entropy(self.net(points), arms)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def spirals(count):
    index = torch.arange(count)
    arm, radius = index % 3, 0.2 + 0.8 * index / count
    angle = arm * 2 * math.pi / 3 + 5 * radius
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return torch.utils.data.TensorDataset(points, arm)


adapter.fit(
    Spirals(), spirals(3000), steps=120, batch_size=64, microbatch_size=16, version="spirals-2"
)
