"""Rows about the machine: what it is, what its copies and products reach, and what a capture costs
compared with them."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.work import wait_for
from benchmarks.runtime.capture import moving, table_of
from holdfast.checkpoint.capture.capturer import Capturer
from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy, CopyTiming
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.layout import Layout, place_layout


def environment(settings: Settings) -> RowResult:
    """Device, driver and versions."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    if settings.device == "cpu":
        return RowResult(f"a CPU, torch {torch.__version__}", found)
    cuda: Any = torch.cuda
    properties = cuda.get_device_properties(0)
    asked = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
    found |= {
        "device": properties.name,
        "devices": torch.accelerator.device_count(),
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": list(cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(cuda.nccl.version()),
        "nvidia_smi": said_by(["nvidia-smi", asked, "--format=csv,noheader"]),
    }
    versions = f"torch {torch.__version__}, CUDA {found['cuda']}, NCCL {found['nccl']}"
    return RowResult(f"{found['nvidia_smi'] or properties.name}; {versions}", found)


def said_by(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Median wall seconds, after one round that warms up."""
    taken = []
    for _ in range(rounds + 1):
        wait_for(device)
        begun = time.perf_counter()
        work()
        wait_for(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def floors(settings: Settings) -> RowResult:
    """Copies on the device, to and from locked host memory, and a bf16 product."""
    device, on_cpu = settings.torch_device, settings.device == "cpu"
    size, width = (2**22, 256) if settings.quick else (2**31, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(size // 2, dtype=torch.uint8, pin_memory=not on_cpu)
    part = source[: size // 2]
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    figures = {
        "device_copy_gb_s": 2 * size / 1e9 / seconds_of(lambda: target.copy_(source), device),
        "to_device_gb_s": host.numel()
        / 1e9
        / seconds_of(lambda: part.copy_(host, non_blocking=True), device),
        "to_host_gb_s": host.numel()
        / 1e9
        / seconds_of(lambda: host.copy_(part, non_blocking=True), device),
        "bf16_product_tflop_s": 2 * width**3 / 1e12 / seconds_of(lambda: a @ b, device, 20),
    }
    return RowResult(
        f"copy on the device {figures['device_copy_gb_s']:,.0f} GB/s, to it "
        f"{figures['to_device_gb_s']:.1f}, from it {figures['to_host_gb_s']:.1f}; "
        f"bf16 product {figures['bf16_product_tflop_s']:,.0f} TFLOP/s",
        figures,
    )


def start(settings: Settings) -> RowResult:
    """Seconds that a worker, forked from a process that has imported torch, needs before its first
    step: each of these happens once in a process."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException), os.fdopen(write_end, "w") as answer:
            answer.write(json.dumps(_first_times(settings)))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    figures = json.loads(told)
    return RowResult(", ".join(f"{name} {s:.2f} s" for name, s in figures.items()), figures)


def _first_times(settings: Settings) -> dict[str, float]:
    """Each in its order, in this process."""
    device, found = settings.torch_device, dict[str, float]()

    def timed(name: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        wait_for(device)
        found[name] = time.perf_counter() - begun

    def backward(where: torch.device) -> None:
        x = torch.ones(64, 64, device=where, requires_grad=True)
        torch.autograd.backward((x @ x).sum())

    begun = time.perf_counter()
    if settings.device != "cpu":
        cuda: Any = torch.cuda
        cuda.init()
    found["driver"] = time.perf_counter() - begun
    timed("first tensor", lambda: torch.zeros(1, device=device))
    timed("backward on the CPU", lambda: backward(torch.device("cpu")))
    timed("backward on the device", lambda: backward(device))
    if settings.device != "cpu":
        timed("locked GiB", lambda: torch.empty(2**30, dtype=torch.uint8, pin_memory=True))
    return found


def capture(settings: Settings) -> RowResult:
    """The state of some GB into a mover's arena: alone, hidden behind products, and until it is
    durable."""
    device = settings.torch_device
    table = table_of(8 if settings.quick else 4096, 40)
    rounds = 2 if settings.quick else 4
    with moving(settings.scratch / "capture", keep_last=1) as (client, run):
        tensors = {spec.name: torch.randn(spec.shape, device=device) for spec in table}
        topology = place_layout(Layout(), 1, ("here",))
        begun = time.perf_counter()
        client.expect(topology, table)
        capturer = Capturer(client, topology, table, 0, tensors, run=run)
        opening = time.perf_counter() - begun
        figures = _captures(capturer, client, device, rounds, settings.quick)
        capturer.close()
    size = capturer.nbytes / 1e9
    figures |= {"bytes": capturer.nbytes, "arena_s": opening, "floor_s": _copy_floor(size, device)}
    line = (
        f"{size:.1f} GB: standing {figures['standing_s']:.3f} s, the copy of as many bytes "
        f"{figures['floor_s']:.3f} s; hidden {1e3 * figures['hidden_s']:.1f} ms of a step of "
        f"{1e3 * figures['step_s']:.0f} ms ({1e3 * figures['step_with_copy_s']:.0f} ms with it); "
        f"durable after {figures['durable_s']:.1f} s; arena made in {opening:.1f} s"
    )
    return RowResult(line, figures)


def _copy_floor(gigabytes: float, device: torch.device) -> float:
    """Seconds of one copy of as many bytes into locked memory."""
    size = int(min(gigabytes, 1.0) * 1e9)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    one = seconds_of(lambda: host.copy_(source, non_blocking=True), device)
    return one * gigabytes * 1e9 / size


def _captures(
    capturer: Capturer, client: MoverClient, device: torch.device, rounds: int, quick: bool
) -> dict[str, Any]:
    """Medians over `rounds` captures of each kind."""
    width = 256 if quick else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))

    def compute() -> None:  # some hundred milliseconds, as a step's forward and backward
        for _ in range(2 if quick else 300):
            a @ b

    step_s = seconds_of(compute, device, 3)
    standing, hidden, with_copy, durable, copying = (list[float]() for _ in range(5))
    for step in range(1, 2 * rounds + 1):
        is_hidden = step > rounds
        costs: list[CopyTiming] = []
        wait_for(device)
        begun = time.perf_counter()
        made = capturer.begin(step, wait=60)
        if not isinstance(made, ChunkedCopy):
            raise RuntimeError(made.reason)
        capturer.call_when_copied(step, costs.append)
        pause = time.perf_counter() - begun
        if is_hidden:
            compute()
            wait_for(device)
        pause += capturer.fence()
        (with_copy if is_hidden else standing).append(time.perf_counter() - begun)
        if costs[0].error is not None:
            raise costs[0].error
        copying.append(costs[0].copy_s)
        if is_hidden:
            hidden.append(pause)
        begun = time.perf_counter()
        capturer.announce(step, {})
        if (reason := capturer.wait_until_committed(step, 120)) is not None:
            raise RuntimeError(reason)
        durable.append(time.perf_counter() - begun)
    middle = statistics.median
    return {
        "standing_s": middle(standing),
        "hidden_s": middle(hidden),
        "step_s": step_s,
        "step_with_copy_s": middle(with_copy),
        "copy_s": middle(copying),
        "durable_s": middle(durable),
        "interpreter": sys.version.split()[0],
    }
