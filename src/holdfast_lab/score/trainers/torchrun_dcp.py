"""The agent of a node and the loop of its worker for `holdfast score --trainer torchrun-dcp`.

    python -m holdfast_lab.score.trainers.torchrun_dcp FOLDER NODES STORE ADDRESS KEY=VALUE...

The agent is torchrun's own, started by the function that the command `torchrun` calls. STORE is
HOST:PORT, and ADDRESS that of this node. KEY=VALUE are settings of its rendezvous. The agent has
imported torch and forks its worker. The command would start an interpreter for each worker, which
takes as long at any compression of time.

DDP over gloo with a fixed global batch. All processes save with `torch.distributed.checkpoint`,
at Young's interval for the measured time of a save and the scenario's interruptions. The newest
complete checkpoint is read at each start.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from datetime import timedelta
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdfast_lab.score.trainers.gate import wait_at_gate
from holdfast_lab.score.trainers.workload import (
    BATCH,
    Lines,
    is_resilient,
    module,
    samples,
    share_of,
    summed_loss,
)

_KEPT = 3
_PEER_TIMEOUT_S = 10.0  # how long a worker waits for its peers, longer than the longest step


def main() -> None:
    folder, nodes, store, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=nodes,
        nproc_per_node=1,
        run_id="score",
        rdzv_backend="c10d",
        rdzv_endpoint=store,
        rdzv_configs=dict(setting.split("=", 1) for setting in sys.argv[5:]),
        max_restarts=1000,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=address,
    )
    wait_at_gate()
    elastic_launch(config, train)(folder)


def train(folder: Path) -> None:
    """Train as one worker of a group, without end."""
    torch.set_num_threads(1)
    lines = Lines()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_PEER_TIMEOUT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    # A number that is higher than that of any group before, the same on all ranks.
    number = torch.zeros((), dtype=torch.int64)
    if rank == 0:
        file = folder / "generation"
        number += 1 + (int(file.read_text()) if file.exists() else 0)
        file.write_text(str(int(number)))
    dist.broadcast(number, 0)
    generation = int(number)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(module())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = _load(folder, model, optimizer)
    between = float(os.environ["HOLDFAST_SCORE_BETWEEN_S"])
    cost, saved_at = float(os.environ["HOLDFAST_SCORE_SAVE_S"]), time.monotonic()
    while True:
        ranges = share_of(step + 1, rank, world)
        total = torch.zeros(())
        optimizer.zero_grad()
        with model.no_sync():
            for start, stop in ranges[:-1]:
                total += _backward(model, start, stop, world)
        total += _backward(model, *ranges[-1], world)
        optimizer.step()
        step += 1
        lines.write(step, generation, rank, world, ranges, float(total))
        # every rank must decide alike
        due = torch.tensor(float(time.monotonic() - saved_at >= sqrt(2 * cost * between)))
        dist.broadcast(due, 0)
        if is_resilient() and due:
            began = time.monotonic()
            save(_state(model, optimizer), checkpoint_id=folder / f"at-{step:08d}")
            saved_at = time.monotonic()
            cost = saved_at - began
            if rank == 0:
                for old in _complete(folder)[:-_KEPT]:
                    shutil.rmtree(old, ignore_errors=True)


def _backward(model: nn.Module, start: int, stop: int, world: int) -> torch.Tensor:
    """The gradient of the mean over the global batch; DDP divides by the number of ranks."""
    loss = summed_loss(model, *samples(start, stop))
    torch.autograd.backward([loss * world / BATCH])
    return loss.detach()


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("at-*") if (path / ".metadata").exists())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, whose state is loaded; 0: none."""
    found = _complete(folder)
    if not found:
        return 0
    state = _state(model, optimizer)
    load(state, checkpoint_id=found[-1])
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(found[-1].name.removeprefix("at-"))


if __name__ == "__main__":
    main()
