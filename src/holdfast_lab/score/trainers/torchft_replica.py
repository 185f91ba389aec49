"""The loop of `holdfast score --trainer torchft`: one replica group of one process.

    python -m holdfast_lab.score.trainers.torchft_replica REPLICAS LIGHTHOUSE FOLDER ADDRESS

The gate gives the number of the replica. ADDRESS is that of its node. As in torchft's own examples,
each replica computes its fixed share of a step. The share of a replica that is lost is left out of
that step. A replica that starts is sent the state by another one. Nothing is written to disk. The
first replicas wait for each other by files in FOLDER, so that all runs begin alike. If
HOLDFAST_SCORE_RESILIENT is 0, gradients go through a plain gloo group instead.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast_lab.score.trainers.gate import wait_at_gate
from holdfast_lab.score.trainers.workload import (
    BATCH,
    Lines,
    is_resilient,
    microbatch_seconds,
    module,
    samples,
    share_of,
    summed_loss,
)

_TIMEOUT_S = 10.0  # of calls between replicas


def main() -> None:
    torch.set_num_threads(1)
    replicas, lighthouse, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    address = sys.argv[4]
    torch.manual_seed(1)
    model = module()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if is_resilient():
        import_module("torchft")
    (replica,) = map(int, wait_at_gate())
    if is_resilient():
        _train_resilient(replica, replicas, lighthouse, folder, address, model, inner)
    else:
        lines = Lines()
        dist.init_process_group("gloo", init_method=lighthouse, rank=replica, world_size=replicas)
        step = 0
        while True:
            inner.zero_grad(set_to_none=False)
            ranges = share_of(step + 1, replica, replicas)
            total = _gradients(model, ranges, BATCH // replicas)
            _reduced(model, lambda whole: dist.all_reduce(whole.div_(replicas)))
            inner.step()
            step += 1
            lines.write(step, 1, replica, replicas, ranges, float(total))


def _train_resilient(
    replica: int,
    replicas: int,
    lighthouse: str,
    folder: Path,
    address: str,
    model: nn.Module,
    inner: torch.optim.Optimizer,
) -> None:
    torchft = import_module("torchft")
    lines = Lines()
    store = import_module("torch.distributed").TCPStore(
        address, 0, is_master=True, wait_for_workers=False
    )

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    share = share_of(1, replica % replicas, replicas)
    # A process in gloo's ring learns of a loss by this deadline alone. So it is as short as a
    # steady step allows.
    patience = timedelta(seconds=microbatch_seconds() * len(share) + 0.5)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"r{replica}_{os.getpid()}",
        hostname=address,
        heartbeat_interval=timedelta(milliseconds=50),
        checkpoint_transport=_state_transport(address),
        timeout=timedelta(seconds=_TIMEOUT_S),
        quorum_timeout=timedelta(seconds=_TIMEOUT_S),
    )
    optimizer = torchft.Optimizer(manager, inner)
    # Once all replicas of the beginning have come. Later ones do not wait.
    (folder / f"first-{replica}").touch()
    while not all((folder / f"first-{each}").exists() for each in range(replicas)):
        time.sleep(0.02)
    while True:
        optimizer.zero_grad(set_to_none=False)
        step = int(manager.current_step()) + 1
        ranges = share_of(step, replica % replicas, replicas)
        total = _gradients(model, ranges, BATCH // replicas)
        # The hook of torchft's own DDP fails once a peer is lost (0.2): one reduction of them all.
        _reduced(model, lambda whole: manager.allreduce(whole).wait())
        optimizer.step()
        if int(manager.current_step()) == step:
            workers, quorum = int(manager.num_participants()), int(manager._quorum_id)
            lines.write(step, quorum, replica, workers, ranges, float(total))


def _state_transport(address: str) -> Any:
    """torchft's own, which sends the state from this node's address. By default it gives the name
    of the machine, which leads another network's node to itself."""
    module = import_module("torchft.checkpointing.http_transport")
    transport = module.HTTPTransport(timeout=timedelta(seconds=_TIMEOUT_S), num_chunks=0)
    metadata = transport.metadata
    transport.metadata = lambda: metadata().replace(f"//{socket.gethostname()}:", f"//{address}:")
    return transport


def _gradients(model: nn.Module, ranges: list[tuple[int, int]], divisor: int) -> Tensor:
    total = torch.zeros(())
    for start, stop in ranges:
        loss = summed_loss(model, *samples(start, stop))
        torch.autograd.backward([loss / divisor])
        total += loss.detach()
    return total


def _reduced(model: nn.Module, reduce: Callable[[Tensor], object]) -> None:
    """Replace the gradients by their mean over the replicas."""
    made = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in made])
    reduce(whole)
    for gradient, part in zip(made, torch.split(whole, [g.numel() for g in made]), strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
