import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from points import Points
from torch import nn

STEPS, BATCH, MICROBATCH, SAVE_EVERY = 300, 64, 16, 10

folder = Path(sys.argv[1])
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project, step_scheduler_with_optimizer=False)
set_seed(1)
dataset = Points()
model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
order = torch.utils.data.RandomSampler(dataset, num_samples=STEPS * BATCH, replacement=True)
loader = torch.utils.data.DataLoader(dataset, MICROBATCH, sampler=order)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.gradient_accumulation_steps = BATCH // MICROBATCH // accelerator.num_processes
first = 0
saved = sorted((folder / "checkpoints").glob("checkpoint_*"), key=lambda p: int(p.name[11:]))
if saved:
    accelerator.load_state(str(saved[-1]))
    first = (int(saved[-1].name[11:]) + 1) * SAVE_EVERY
    project.iteration = int(saved[-1].name[11:]) + 1
    skipped = first * accelerator.gradient_accumulation_steps
    loader = accelerator.skip_first_batches(loader, skipped)
batches = iter(loader)
for step in range(first, STEPS):
    for _ in range(accelerator.gradient_accumulation_steps):
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % SAVE_EVERY == 0:
        accelerator.save_state()
