"""The driver of `holdfast score --trainer ray-train`: a Ray cluster whose nodes are raylets here.

    python -m holdfast_lab.score.trainers.ray_driver FOLDER PLACES RESIZE_S

Commands come as lines on standard input: `start NODE` and `kill NODE`. The file FOLDER/raylets has
a line `NODE PID` for each raylet that was started. Ray Train v2 runs elastically on 1 to PLACES
workers. Rank 0 reports a checkpoint at Young's interval; each start reads the newest one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast_lab.score.trainers.workload import (
    BATCH,
    Lines,
    is_resilient,
    module,
    samples,
    share_of,
    summed_loss,
)

_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_STORE_BYTES = 80 * 2**20  # of each raylet's object store: the least that Ray takes


def main() -> None:
    folder, places, resize_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    os.environ.update(_SETTINGS)
    ray = import_module("ray")
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES}
    )
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    threading.Thread(target=_train, args=(folder, places, resize_s), daemon=True).start()
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        word, node = line.split()
        if word == "start":
            nodes[node] = cluster.add_node(wait=False, num_cpus=1, object_store_memory=_STORE_BYTES)
            (raylet,) = nodes[node].all_processes["raylet"]
            with (folder / "raylets").open("a") as out:
                out.write(f"{node} {raylet.process.pid}\n")
        elif node in nodes:
            cluster.remove_node(nodes.pop(node), allow_graceful=False)


def _train(folder: Path, places: int, resize_s: float) -> None:
    train, torch_train = import_module("ray.train"), import_module("ray.train.torch")
    torch_train.TorchTrainer(
        _loop,
        torch_config=torch_train.TorchConfig(backend="gloo", timeout_s=30),
        scaling_config=train.ScalingConfig(
            num_workers=(1, places),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=resize_s,
        ),
        run_config=train.RunConfig(
            storage_path=str(folder / "ray"),
            name="score",
            failure_config=train.FailureConfig(max_failures=1000),
            checkpoint_config=train.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()


def _loop() -> None:
    train = import_module("ray.train")
    torch.set_num_threads(1)
    lines, context = Lines(), train.get_context()
    rank, world = int(context.get_world_rank()), int(context.get_world_size())
    torch.manual_seed(1)
    plain = module()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    step = _load(train, plain, optimizer)
    number = torch.tensor(time.time_ns() // 1000)  # of this group, later than any before
    dist.broadcast(number, 0)
    model = nn.parallel.DistributedDataParallel(plain)
    between = float(os.environ["HOLDFAST_SCORE_BETWEEN_S"])
    cost, saved_at = float(os.environ["HOLDFAST_SCORE_SAVE_S"]), time.monotonic()
    while True:
        ranges = share_of(step + 1, rank, world)
        optimizer.zero_grad()
        total = torch.zeros(())
        for place, (start, stop) in enumerate(ranges):
            model.require_backward_grad_sync = place == len(ranges) - 1
            loss = summed_loss(model, *samples(start, stop))
            torch.autograd.backward([loss * world / BATCH])
            total += loss.detach()
        optimizer.step()
        step += 1
        lines.write(step, int(number), rank, world, ranges, float(total))
        due = torch.tensor(float(time.monotonic() - saved_at >= sqrt(2 * cost * between)))
        dist.broadcast(due, 0)
        if is_resilient() and due:
            began = time.monotonic()
            _save(train, rank, step, plain, optimizer)
            saved_at = time.monotonic()
            cost = saved_at - began


def _save(
    train: Any, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Every rank reports; rank 0 with a checkpoint."""
    if rank != 0:
        train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as place:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(place) / "state")
        train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(place))


def _load(train: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, whose state is loaded; 0: none."""
    saved = train.get_checkpoint()
    if saved is None:
        return 0
    with saved.as_directory() as place:
        state = torch.load(Path(place) / "state")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
