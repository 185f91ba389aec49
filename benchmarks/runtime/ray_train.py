"""Ray Train on the cluster of `benchmarks/runtime/ray.py`: a worker killed, a machine killed.

    python -m benchmarks.runtime.ray_train [--rounds 2]

Four workers with gloo, and machines that are free. Each step is an all-reduce, 0.1 s of sleep and a
reported checkpoint. Prints one JSON object a loss: seconds from the SIGKILL until another worker's
collective raised, and until all four workers did a step again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from tests.support.ray_cluster import HEAD, RayCluster, ray_cluster

WORKERS = 4
STEPS = 100_000
DEADLINE_S = 240.0
TRAIN_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


def train_loop(config: dict[str, Any]) -> None:
    """Runs in each worker of Ray Train; writes what happens into the file `config["log"]`."""
    import torch
    import torch.distributed as dist
    from ray import train

    def note(what: str) -> None:
        with Path(config["log"]).open("a") as log:
            log.write(f"{time.time():.4f} {what}\n")

    rank, step = train.get_context().get_world_rank(), 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text())
    address = import_module("ray.util").get_node_ip_address()
    note(f"start {rank} {os.getpid()} {address}")
    value = torch.ones(10)
    while step < STEPS:
        try:
            dist.all_reduce(value)
        except RuntimeError:
            note(f"error {rank}")
            raise
        value /= WORKERS
        time.sleep(0.1)
        step += 1
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            saved = train.Checkpoint.from_directory(folder) if rank == 0 else None
            train.report({"step": step}, checkpoint=saved)
        note(f"step {rank}")


class Log:
    """What the workers have written: (time, words)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self, after: float, *words: str) -> list[tuple[float, list[str]]]:
        if not self._path.exists():
            return []
        split = [line.split() for line in self._path.read_text().splitlines()]
        return [
            (float(at), found)
            for at, *found in split
            if float(at) > after and tuple(found[: len(words)]) == words
        ]

    def first_step_of_all(self, after: float) -> float | None:
        """When each rank had done a step; steps in flight at `after` are of the lost group."""
        started = [at for at, _ in self.lines(after, "start")]
        if len(started) < WORKERS:
            return None
        steps = [self.lines(started[0], "step", str(rank)) for rank in range(WORKERS)]
        return max(found[0][0] for found in steps) if all(steps) else None


def wait(due: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not due():
        if time.monotonic() > until:
            raise TimeoutError("Ray Train did not continue")
        time.sleep(0.05)


def lose(cluster: RayCluster, log: Log, what: str) -> dict[str, float | str]:
    """Kill a worker or its machine, and measure until training continues."""
    *_, (_, (_, _, pid, host)) = log.lines(0, "start", "3")
    killed = time.time()
    if what == "worker":
        os.kill(int(pid), signal.SIGKILL)
    else:
        cluster.lose(cluster.machine_at(host))
    wait(lambda: log.first_step_of_all(killed))
    errors = [at for at, _ in log.lines(killed, "error")]
    result: dict[str, float | str] = {"system": "Ray Train", "lost": what}
    result["error_s"] = round(min(errors) - killed, 3) if errors else "none"
    result["all_s"] = round((log.first_step_of_all(killed) or 0) - killed, 2)
    return result


def measure(rounds: int, cluster: RayCluster, folder: Path) -> None:
    log = Log(folder / "log")

    def disturb() -> None:
        wait(lambda: log.first_step_of_all(0))
        for what in [each for each in ("worker", "machine") for _ in range(rounds)]:
            time.sleep(2)
            print(json.dumps(lose(cluster, log, what)), flush=True)
        cluster.close()
        os._exit(0)  # the trainer itself has no end

    train, torch_train = import_module("ray.train"), import_module("ray.train.torch")
    Thread(target=disturb, daemon=True).start()
    torch_train.TorchTrainer(
        train_loop,
        train_loop_config={"log": str(folder / "log")},
        torch_config=torch_train.TorchConfig(backend="gloo", timeout_s=30),
        scaling_config=train.ScalingConfig(
            num_workers=WORKERS, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=train.RunConfig(
            storage_path=str(folder),
            name="run",
            failure_config=train.FailureConfig(max_failures=100),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    os.environ.update(TRAIN_SETTINGS)
    machines = [f"machine-{number}" for number in range(WORKERS + rounds)]  # none is added later
    with tempfile.TemporaryDirectory() as folder, ray_cluster(*machines) as cluster:
        import_module("ray").init(
            cluster.address, _node_ip_address=HEAD, logging_level="ERROR", log_to_driver=False
        )
        measure(rounds, cluster, Path(folder))


if __name__ == "__main__":
    main()
