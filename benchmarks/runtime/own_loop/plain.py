import torch
import torch.nn.functional as F
from points import Points
from torch import nn

STEPS, BATCH, MICROBATCH = 300, 64, 16

torch.manual_seed(1)
dataset = Points()
model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
order = torch.utils.data.RandomSampler(dataset, num_samples=STEPS * BATCH, replacement=True)
loader = iter(torch.utils.data.DataLoader(dataset, MICROBATCH, sampler=order))
for _ in range(STEPS):
    optimizer.zero_grad()
    for _ in range(BATCH // MICROBATCH):
        batch = next(loader)
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) * MICROBATCH / BATCH
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
