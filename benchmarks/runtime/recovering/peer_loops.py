"""The loops of other systems that `benchmarks.runtime.recovery` breaks.

    python -m benchmarks.runtime.recovering.peer_loops NAME FOLDER SECONDS     (dcp: under torchrun)

Each has a model of 0.8 M parameters with AdamW and a step that waits as long as ours does. Its
gradients are averaged over four processes, and it writes the same line a step
(`recovering/worker.py`). A step that was computed and given up is reported with its number below
zero.

    dcp      torchrun restarts all processes; DCP saves every fifth step, and is read at the start
    torchft  four replica groups; the one that is killed is started again, and is sent the state
    ray      Ray Train v2; rank 0 reports a checkpoint after every step
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS = 256, 12  # 0.79 M parameters
WORLD, EVERY = 4, 5


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def compute(model: nn.Module, seconds: float) -> None:
    time.sleep(seconds)
    model(torch.ones(8, WIDTH)).square().mean().backward()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Memory for them, which stays."""
    made = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        made.append(parameter.grad)
    return made


def tell(lines: int, step: int, generation: int, rank: int, workers: int) -> None:
    said = (time.time(), step, generation, rank, os.getpid(), workers)
    os.write(lines, (" ".join(map(str, said)) + "\n").encode())


def opened(folder: Path) -> int:
    return os.open(folder / "lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def dcp(folder: Path, seconds: float) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    lines, rank = opened(folder), dist.get_rank()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    model = nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    saved = sorted(path for path in folder.glob("at-*") if (path / ".metadata").exists())
    if saved:
        step = int(saved[-1].name.removeprefix("at-"))
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments}
        checkpoint.load(state, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    while True:
        optimizer.zero_grad()
        compute(model, seconds)
        optimizer.step()
        step += 1
        tell(lines, step, generation, rank, dist.get_world_size())
        if step % EVERY == 0:
            parameters, moments = get_state_dict(model, optimizer)
            state = {"model": parameters, "optimizer": moments}
            checkpoint.save(state, checkpoint_id=folder / f"at-{step:08d}")


def torchft(folder: Path, seconds: float) -> None:
    """RECOVERY_REPLICA is its number, RECOVERY_LIGHTHOUSE the lighthouse's address."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    replica, lines = int(os.environ["RECOVERY_REPLICA"]), opened(folder)
    model = model_of()
    inner = torch.optim.AdamW(model.parameters())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    # A process that waits in gloo's ring for a live one learns of a loss by this deadline alone. So
    # it is as short as a steady step allows.
    patience = timedelta(seconds=seconds + 0.5)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["RECOVERY_LIGHTHOUSE"],
        replica_id=f"r{replica}",
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=50),
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=10),
    )
    optimizer = Optimizer(manager, inner)
    gradients = _gradients(model)
    sizes = [gradient.numel() for gradient in gradients]
    while True:
        optimizer.zero_grad(set_to_none=False)
        compute(model, seconds)
        # One reduction of them all: the hook of torchft's own DDP fails once a peer is lost (0.2).
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(whole).wait()
        for gradient, part in zip(gradients, whole.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
        before = manager.current_step()
        optimizer.step()
        after = manager.current_step()
        quorum, workers = int(manager._quorum_id), manager.num_participants()
        tell(lines, after if after > before else -before - 1, quorum, replica, workers)


def ray(folder: Path, seconds: float) -> None:
    os.environ |= {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    }
    import ray as cluster
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster.init(
        "local",
        num_cpus=WORLD + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 * 2**20,
    )
    TorchTrainer(
        _ray_loop,
        train_loop_config={"folder": str(folder), "seconds": seconds},
        torch_config=TorchConfig(backend="gloo", timeout_s=30),
        scaling_config=ScalingConfig(num_workers=WORLD, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            name="r",
            failure_config=FailureConfig(max_failures=50),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def _ray_loop(told: dict[str, Any]) -> None:
    import ray.train as train

    lines, context = opened(Path(told["folder"])), train.get_context()
    rank, step = context.get_world_rank(), 0
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    if (saved := train.get_checkpoint()) is not None:
        with saved.as_directory() as place:
            state = torch.load(Path(place) / "state")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
    generation = step + 1  # later than that of any attempt before
    wrapped = nn.parallel.DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        compute(wrapped, told["seconds"])
        optimizer.step()
        step += 1
        tell(lines, step, generation, rank, context.get_world_size())
        if rank != 0:
            train.report({"step": step})
            continue
        with tempfile.TemporaryDirectory() as place:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(place) / "state")
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(place))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"dcp": dcp, "torchft": torchft, "ray": ray}[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]))
