import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from points import Points
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

STEPS, BATCH, MICROBATCH = 300, 64, 16

torch.manual_seed(1)
dataset = Points()
model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 3))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)


def load_state(state):
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def save_state():
    return {
        "model": model.state_dict(),
        "optimizer": inner.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


replica = int(os.environ["REPLICA"])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load_state,
    state_dict=save_state,
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=os.environ["LIGHTHOUSE"],
    replica_id=f"replica{replica}",
)
optimizer = Optimizer(manager, inner)
generator = torch.Generator().manual_seed(replica)  # other samples after a loss, as in its examples
while manager.current_step() < STEPS:
    optimizer.zero_grad()
    for _ in range(BATCH // MICROBATCH // manager.num_participants()):
        index = torch.randint(len(dataset), (MICROBATCH,), generator=generator)
        batch = torch.utils.data.default_collate([dataset[int(i)] for i in index])
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) * MICROBATCH / BATCH
        loss.backward()
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:
        scheduler.step()
