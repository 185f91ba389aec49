"""Our interpreter against torch.distributed.pipelining's, on the same table and the same stages.

Both run in the same processes, one thread each, in turns, float32 on the CPU. A round times one
step of each, and the ratio (theirs / ours, above 1: ours is faster) is taken within it. A step
counts from a common start to the end of the last rank. Losses and gradients of both are compared
bit for bit before anything is timed. The floor is a message of the boundary's size sent to and fro
between two ranks that do nothing else. Then both are torn down and rebuilt again and again in the
same processes, and what is left behind is counted.

    python -m benchmarks.runtime.interpreters [--rounds 40] [--ranks 2] [--microbatches 8]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tests.support.ranks import RankContext, Server, run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.runtime.paired import estimate
from holdfast.core.schedule.csv import to_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Schedule
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.pipeline.pipeline import PipelineInterpreter

CPU = torch.device("cpu")


class ModuleStages:
    """Stages that are modules of one width (`StageWork`): activations are [rows, width].

    The loss of a microbatch is its summed square distance to the target.
    inputs, targets: one per microbatch; only the first stage reads one, only the last the other.
    """

    def __init__(
        self, stages: dict[int, nn.Module], last: int, inputs: list[Tensor], targets: list[Tensor]
    ):
        self.stages, self.last, self.inputs, self.targets = stages, last, inputs, targets
        self.losses: list[Tensor] = []
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """[rows, width]"""
        x = self.inputs[microbatch]
        return tuple(x.shape), x.dtype

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        """[rows, width] to the same, or the loss."""
        x = self.inputs[microbatch] if incoming is None else incoming.requires_grad_()
        y: Tensor = self.stages[stage](x)
        if stage == self.last:
            y = distance(y, self.targets[microbatch])
            self.losses.append(y.detach())
        self._kept[stage, microbatch] = x, y
        return y if stage < self.last else None

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Adds to the parameters' gradients."""
        x, y = self._kept.pop((stage, microbatch))
        torch.autograd.backward(y, gradient)
        return x.grad if stage > 0 else None


def distance(output: Tensor, target: Tensor) -> Tensor:
    """Summed square distance."""
    return (output - target).square().sum()


def make_stage(stage: int, width: int, depth: int, dtype: torch.dtype) -> nn.Module:
    """The same numbers in every process."""
    torch.manual_seed(stage)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width, dtype=dtype), nn.Tanh())]
    return nn.Sequential(*layers)


class Torch:
    """One rank of torch's runtime, which reads our table. Shapes are given, nothing is pickled."""

    def __init__(
        self, module: nn.Module, schedule: Schedule, rank: int, microbatch: Tensor, folder: Path
    ):
        # From these it learns shapes, and whether gradients travel: the first input has none.
        inside = microbatch.clone().requires_grad_()
        stage = PipelineStage(
            module,
            rank,
            schedule.stages,
            CPU,
            input_args=(inside if rank else microbatch,),
            output_args=(inside,),
        )
        runtime: Any = _PipelineScheduleRuntime
        self._runtime = runtime([stage], schedule.microbatches, loss_fn=distance, scale_grads=False)
        table = folder / f"{schedule.name}.{rank}.csv"
        table.write_text(to_csv(schedule))
        self._runtime._load_csv(str(table))
        self._first, self._last = rank == 0, rank == schedule.stages - 1
        self.losses: list[Tensor] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward and backward of a batch, which it cuts into microbatches itself."""
        self.losses.clear()
        arguments = (inputs,) if self._first else ()
        more = {"target": targets, "losses": self.losses} if self._last else {}
        self._runtime.step(*arguments, return_outputs=False, **more)


class Ours:
    """One rank of our interpreter."""

    def __init__(self, module: nn.Module, schedule: Schedule, rank: int, line: PeerGroup):
        self._module, self._schedule, self._rank = module, schedule, rank
        self.interpreter = PipelineInterpreter(line, CPU)
        self.losses: list[Tensor] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward and backward of a batch, cut into the schedule's microbatches."""
        count, last = self._schedule.microbatches, self._schedule.stages - 1
        work = ModuleStages(
            {self._rank: self._module}, last, list(inputs.chunk(count)), list(targets.chunk(count))
        )
        self.interpreter.run(self._schedule, work)
        self.losses = work.losses


def compare(
    rank: RankContext,
    schedule: str,
    microbatches: int,
    width: int,
    depth: int,
    rows: int,
    rounds: int,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Body of a rank: are both equal, and how long does each take."""
    size = rank.world_size
    rank.init_torch_world()
    line = PeerGroup(rank.store("line"), "line", rank.rank, size, seconds=60)
    table, number = build_schedule(schedule, size, microbatches), getattr(torch, dtype)
    generator = torch.Generator().manual_seed(7)
    shape = (rows * microbatches, width)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=number) for _ in range(2))
    module = make_stage(rank.rank, width, depth, number)
    theirs = Torch(module, table, rank.rank, inputs[:rows], rank.folder)
    ours = Ours(module, table, rank.rank, line)

    def meet() -> None:
        exchange(line, torch.zeros(1, dtype=torch.int64), [1] * size, tag=1)

    def gradients(step: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        step(inputs, targets)
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    pairs = list(zip(gradients(theirs.step), gradients(ours.step), strict=True))
    equal = bool(pairs) and all(torch.equal(a, b) for a, b in pairs)
    equal = equal and [float(x) for x in theirs.losses] == [float(x) for x in ours.losses]
    # Accumulate first into existing gradients, so that no step pays for making them.
    times: dict[str, list[tuple[float, float]]] = {"torch": [], "ours": []}
    steps = {"torch": theirs.step, "ours": ours.step}
    for turn in range(rounds):
        for name in ("torch", "ours") if turn % 2 else ("ours", "torch"):
            meet()
            cpu, wall = time.process_time(), time.monotonic()
            steps[name](inputs, targets)
            times[name].append((time.monotonic() - wall, time.process_time() - cpu))
    floor = ping_pong(line, inputs[:rows], 50)
    meet()
    rank.barrier("done")
    dist.destroy_process_group()
    return {"equal": equal, "times": times, "floor": floor, "losses": len(ours.losses)}


def ping_pong(line: PeerGroup, message: Tensor, rounds: int) -> list[float]:
    """Return the seconds that a message takes one way between ranks 0 and 1; empty on other ranks.

    All ranks call. The sends are kept until an exchange shows that they have arrived.
    """
    took, sends = [], []
    if line.rank <= 1:
        peer, buffer = 1 - line.rank, torch.empty_like(message)
        for turn in range(rounds):
            receipt = line.receive(buffer, peer, 100 + turn)
            began = time.monotonic()
            if line.rank == 0:
                sends.append(line.group.send([message], peer, 100 + turn))
            receipt.wait()
            if line.rank == 1:
                sends.append(line.group.send([message], peer, 100 + turn))
            took.append((time.monotonic() - began) / 2)
    exchange(line, torch.zeros(1, dtype=torch.int64), [1] * line.size, tag=1)
    return took[5:] if line.rank == 0 else []


def rebuild(rank: RankContext, which: str, times: int) -> list[dict[str, int]]:
    """Body of a rank: build, run two steps, tear down, `times` over; what is left each time."""
    size, found = rank.world_size, []
    inputs, targets = torch.ones(8, 16), torch.zeros(8, 16)
    table, module = build_schedule("1f1b", size, 4), make_stage(rank.rank, 16, 1, torch.float32)
    for number in range(times):
        line = PeerGroup(rank.store(f"line{number}"), f"line{number}", rank.rank, size, seconds=60)
        runner: Torch | Ours
        if which == "torch":
            rank.init_torch_world(f"world{number}")
            runner = Torch(module, table, rank.rank, inputs[:2], rank.folder)
        else:
            runner = Ours(module, table, rank.rank, line)
        for _ in range(2):
            runner.step(inputs, targets)
        exchange(line, torch.zeros(1, dtype=torch.int64), [1] * size, tag=1)
        rank.barrier(f"done{number}")
        del runner
        line.close()
        del line
        if which == "torch":
            dist.destroy_process_group()
        gc.collect()
        me = psutil.Process(os.getpid())
        rank.barrier(f"closed{number}")
        found.append(
            {
                "descriptors": me.num_fds(),
                "threads": me.num_threads(),
                "python threads": threading.active_count(),
                "RSS KB": me.memory_info().rss // 1024,
            }
        )
    return found


def report_speed(values: list[dict[str, Any]], name: str) -> None:
    """One line of the table: medians of the slowest rank, paired ratios with their interval."""
    rounds = range(len(values[0]["times"]["ours"]))
    walls = {
        who: [max(v["times"][who][i][0] for v in values) for i in rounds]
        for who in ("torch", "ours")
    }
    cpus = {
        who: [sum(v["times"][who][i][1] for v in values) for i in rounds]
        for who in ("torch", "ours")
    }
    wall = estimate([t / o for t, o in zip(walls["torch"], walls["ours"], strict=True)])
    cpu = estimate([t / o for t, o in zip(cpus["torch"], cpus["ours"], strict=True)])
    equal = "equal" if all(v["equal"] for v in values) else "UNEQUAL"
    print(
        f"{name:<8}{equal:<9}{1e3 * statistics.median(walls['torch']):>9.1f}"
        f"{1e3 * statistics.median(walls['ours']):>9.1f}  {wall!s:<24}"
        f"{1e3 * statistics.median(cpus['torch']):>9.1f}"
        f"{1e3 * statistics.median(cpus['ours']):>9.1f}  {cpu}"
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch")
    parser.add_argument("--depth", type=int, default=8, help="linear layers of a stage")
    parser.add_argument("--rebuilds", type=int, default=20)
    given = parser.parse_args()
    server = Server()
    try:
        run = partial(run_ranks, deadline=600.0, address=server.address)
        print(f"{'':<17}{'wall ms':>18}{'':26}{'CPU ms, all ranks':>18}")
        print(
            f"{'table':<8}{'bits':<9}{'torch':>9}{'ours':>9}  {'torch / ours':<24}"
            f"{'torch':>9}{'ours':>9}  torch / ours"
        )
        floor: list[float] = []
        for name in ("1f1b", "gpipe"):
            args = {
                "schedule": name,
                "microbatches": given.microbatches,
                "width": given.width,
                "depth": given.depth,
                "rows": given.rows,
                "rounds": given.rounds,
            }
            values = values_of(run(compare, given.ranks, args))
            report_speed(values, name)
            floor += values[0]["floor"]
        nbytes = given.rows * given.width * 4
        print(
            f"floor: {nbytes} bytes one way between idle ranks "
            f"{1e3 * statistics.median(floor):.3f} ms"
        )
        for which in ("torch", "ours"):
            args = {"which": which, "times": given.rebuilds}
            values = values_of(run(rebuild, given.ranks, args))
            early, late = values[0][2], values[0][-1]
            left = ", ".join(f"{what} {early[what]} -> {late[what]}" for what in early)
            print(f"rebuilt, {which}: after 3 -> after {given.rebuilds}: {left}")
    finally:
        server.close()


def values_of(results: list[Any]) -> list[Any]:
    """What the ranks returned; RuntimeError with their logs where one failed."""
    for result in results:
        if result.exit or result.reason:
            raise RuntimeError(f"rank {result.rank}: {result.ended}\n{result.log}")
    return [result.value for result in results]


if __name__ == "__main__":
    from benchmarks.runtime import interpreters

    interpreters.main()
