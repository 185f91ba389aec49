import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.nn.functional as F
from points import Points
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

STEPS, BATCH, MICROBATCH, SAVE_EVERY = 300, 64, 16, 10


def train_loop(config):
    context = ray.train.get_context()
    torch.manual_seed(1)
    dataset = Points()
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first = 0
    saved = ray.train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as place:
            state = torch.load(Path(place) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["step"]
    model = ray.train.torch.prepare_model(model)
    parts = BATCH // MICROBATCH
    order = torch.randint(
        len(dataset), (STEPS, parts, MICROBATCH), generator=torch.Generator().manual_seed(1)
    )
    for step in range(first, STEPS):
        optimizer.zero_grad()
        mine = range(context.get_world_rank(), parts, context.get_world_size())
        for part in mine:
            batch = torch.utils.data.default_collate([dataset[int(i)] for i in order[step, part]])
            loss = F.cross_entropy(model(batch["x"]), batch["y"]) / len(mine)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % SAVE_EVERY:
            continue
        with tempfile.TemporaryDirectory() as place:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "step": step + 1,
                }
                torch.save(state, Path(place) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(place)
            ray.train.report({"step": step + 1}, checkpoint=checkpoint)


TorchTrainer(
    train_loop,
    scaling_config=ScalingConfig(num_workers=int(sys.argv[2])),
    run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=50)),
).fit()
