"""A loop of one's own: which of three spirals does a point lie on? See docs/guide/python.md.

holdfast run train.py --workers 2 -- --hidden 64
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import holdfast


class Points:
    """3,000 points that are made from their index, so there is nothing to download."""

    version = "spirals-1"

    def __len__(self):
        return 3000

    def __getitem__(self, index):
        arm, radius = index % 3, 0.2 + 0.8 * index / 3000
        noise = torch.randn(2, generator=torch.Generator().manual_seed(index)) * 0.02
        angle = arm * 2 * math.pi / 3 + 5 * radius
        point = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)])
        return {"point": point + noise, "arm": arm}


parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

points = Points()
model = nn.Sequential(
    nn.Linear(2, options.hidden),
    nn.SiLU(),
    nn.Dropout(0.1),
    nn.Linear(options.hidden, options.hidden),
    nn.SiLU(),
    nn.Linear(options.hidden, 3),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)


def loss_of(batch):
    loss = F.cross_entropy(model(batch["point"]), batch["arm"], reduction="sum")
    return loss, len(batch["arm"])


run = holdfast.run()
run.keep(model, optimizer, scheduler, clip_norm=1.0)
run.validate(points, loss_of, every=50, samples=429)
for step in run.steps(options.steps, batch_size=64, microbatch_size=16):
    for batch in step.batches(points):
        step.backward(*loss_of(batch))
    step.apply()

model.eval()
items = [points[i] for i in range(0, 3000, 7)]
with torch.no_grad():
    found = model(torch.stack([item["point"] for item in items]).to(run.device)).argmax(1)
right = sum(int(a) == item["arm"] for a, item in zip(found, items, strict=True))
print(f"{right / len(items):.0%} of {len(items)} points are right")
