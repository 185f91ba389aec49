"""One rank of `holdfast calibrate`: times operations on its device, and prints them as JSON lines.

    python -m holdfast.training.measure.measure_machine RANK RANKS FOLDER SECONDS DEVICE

All ranks do the same at the same time, as the workers of a run do: cores share caches and memory.
Rank 0 prints. FOLDER is where the ranks meet. DEVICE is a name of `core/devices.py`. Written with
torch.accelerator; it has run on CPUs alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from holdfast.core.devices import device_kind
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.comm.devices import has_bf16_products, select_device
from holdfast.parallel.torch_compat import file_store
from holdfast.plan.cost.layer_times import ATTENTION_BACKWARD
from holdfast.plan.hardware.fit import Sample
from holdfast.plan.probing.probes import probes_for
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.precision import same_kernels_each_time, same_products_on_any_threads
from holdfast.training.measure.equal_steps import one_step
from holdfast.training.memory.malloc import keep_freed_memory

OF_STEPS = 0.7
"""Share of the time that goes to steps of probes."""
_QUEUE_S, _MOST_QUEUED = 0.02, 64
"""Work of an accelerator between two waits for it, in seconds and in operations."""
FEWEST = 3
"""Repetitions of an operation, however long it takes."""
QUANTILE = 0.2
"""Of an operation's times: other programs only ever add to them, and the fastest one is luck."""
_MEETING_TIMEOUT_S = 60.0  # bound of a wait for the other rank
_FEWEST_STEPS, _MOST_STEPS = 4, 60
"""Steps of a probe that are timed."""
_CHAIN = 32  # operations of a chain whose forward and backward give the time of a launch
_CPU_EDGES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CARD_EDGES = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
_CPU_ATTENTION = ((4, 32, 128), (8, 32, 256), (4, 64, 512))
_CARD_ATTENTION = ((128, 64, 2048), (128, 64, 4096), (64, 128, 4096))
"""Heads of all samples, elements of a head, and tokens of a sample."""
_CPU_SIZES = tuple(2**power for power in range(12, 25, 2))
_CARD_SIZES = tuple(2**power for power in range(14, 30, 2))
_MESSAGE_SIZES = tuple(2**power for power in range(8, 24, 2))


@dataclass
class Stopwatch:
    """Times an operation again and again until its share of the time is over.

    All ranks stop after the same number: rank 0 says after each one whether there is another.
    """

    device: torch.device
    share_s: float
    group: dist.ProcessGroup | None

    def time(self, act: Callable[[], object], alike: bool = False) -> float:
        """Seconds of one call of `act` (`QUANTILE`). alike: the ranks need each other in it, so
        they must agree on the number of calls."""
        act()
        settle(self.device)
        clock = time.perf_counter if alike else clock_of(self.device)
        found: list[float] = []
        queued = 1 if alike else self._queued(act)
        end = time.monotonic() + self.share_s
        while True:
            begin = clock()
            for _ in range(queued):
                act()
            settle(self.device)
            found.append((clock() - begin) / queued)
            over = time.monotonic() > end and len(found) >= FEWEST
            if self._agree(over) if alike else over:
                return sorted(found)[int(QUANTILE * len(found))]

    def _queued(self, act: Callable[[], object]) -> int:
        """Calls between two waits for the device. A wait, and the launch before it, take longer
        than a small operation; in a step they pass while the device computes."""
        if self.device.type == "cpu":
            return 1
        begin = time.perf_counter()
        act()
        settle(self.device)
        return max(1, min(_MOST_QUEUED, int(_QUEUE_S / (time.perf_counter() - begin))))

    def _agree(self, over: bool) -> bool:
        if self.group is None:
            return over
        word = torch.tensor([int(over)])
        dist.broadcast(word, src=0, group=self.group)
        return bool(word.item())


def measure(watch: Stopwatch) -> Iterator[Sample]:
    """Everything that one device can show."""
    device = watch.device
    is_cpu = device.type == "cpu"
    tiny = torch.zeros(1, device=device)
    yield Sample("call", watch.time(lambda: [tiny.add_(1) for _ in range(_CHAIN)]) / _CHAIN)
    yield Sample("launch", watch.time(_chain(device)) / (2 * _CHAIN))
    for precision, dtype in _dtypes(device).items():
        for edge in _CPU_EDGES if is_cpu else _CARD_EDGES:
            yield _product(watch, precision, dtype, edge)
        for shape in _CPU_ATTENTION if is_cpu else _CARD_ATTENTION:
            yield _attention(watch, precision, dtype, *shape)
    for size in _CPU_SIZES if is_cpu else _CARD_SIZES:
        one = torch.rand(size // 4, device=device)
        other, out = torch.rand_like(one), torch.empty_like(one)
        add = watch.time(lambda a=one, b=other, c=out: torch.add(a, b, out=c))  # type: ignore[misc]
        yield Sample("kernel", add, 3 * size)
        copy = watch.time(lambda a=one, c=out: c.copy_(a))  # type: ignore[misc]
        yield Sample("copy", copy, 2 * size)
    if not is_cpu:
        for size in _MESSAGE_SIZES:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=device_kind(device.type).can_pin)
            there = torch.empty(size, dtype=torch.uint8, device=device)
            taken = watch.time(lambda a=host, b=there: b.copy_(a, non_blocking=True))  # type: ignore[misc]
            yield Sample("host", taken, size)


def count_operations(is_host: bool, ranks: int) -> int:
    """Samples of `measure` and `measure_links`."""
    sizes, edges = (_CPU_SIZES, _CPU_EDGES) if is_host else (_CARD_SIZES, _CARD_EDGES)
    copies = 0 if is_host else len(_MESSAGE_SIZES)
    links = 2 * len(_MESSAGE_SIZES) if ranks > 1 else 0
    attention = len(_CPU_ATTENTION if is_host else _CARD_ATTENTION)
    return 2 + 2 * (len(edges) + attention) + 2 * len(sizes) + copies + links


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """By the planner's precisions. A card without bf16 computes in fp16, as its row of the table
    says."""
    has_bf16 = has_bf16_products(device)
    return {"fp32": torch.float32, "bf16": torch.bfloat16 if has_bf16 else torch.float16}


def _chain(device: torch.device) -> Callable[[], object]:
    """A forward and backward of operations that compute nothing: what a training step pays for
    each of its kernels."""
    begin = torch.zeros(1, device=device, requires_grad=True)

    def act() -> None:
        value = begin
        for _ in range(_CHAIN):
            value = value * 1.0
        value.backward()  # type: ignore[no-untyped-call]

    return act


def _product(watch: Stopwatch, precision: str, dtype: torch.dtype, edge: int) -> Sample:
    one = torch.rand(edge, edge, device=watch.device).to(dtype)
    other, out = one.clone(), one.clone()
    seconds = watch.time(lambda: torch.mm(one, other, out=out))
    return Sample("product", seconds, 3 * edge**2 * dtype.itemsize, 2.0 * edge**3, precision)


def _attention(
    watch: Stopwatch, precision: str, dtype: torch.dtype, heads: int, size: int, tokens: int
) -> Sample:
    """Causal attention of one sample, forward and backward."""
    q, k, v = (
        torch.rand(1, heads, tokens, size, device=watch.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.rand_like(q)

    def act() -> None:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(mixed, (q, k, v), gradient)

    forward = 2.0 * size * heads * tokens**2  # two products with the half that is not masked
    flops = (1 + ATTENTION_BACKWARD) * forward
    return Sample("attention", watch.time(act), 0.0, flops, precision)


def measure_links(watch: Stopwatch, rank: int, ranks: int) -> Iterator[Sample]:
    """Messages between ranks 0 and 1, there and back, and all-reduces of all ranks."""
    for size in _MESSAGE_SIZES:
        data = torch.zeros(size // 4, device=watch.device)

        def there_and_back(data: torch.Tensor = data) -> None:
            if rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
            elif rank == 1:
                dist.recv(data, 0)
                dist.send(data, 0)

        yield Sample("message", watch.time(there_and_back, alike=True) / 2, size)
        summed = watch.time(lambda data=data: dist.all_reduce(data), alike=True)  # type: ignore[misc]
        yield Sample("allreduce", summed, size, ranks=ranks)


def measure_steps(
    share_s: float, quantile: float, device: torch.device, rank: int, ranks: int, folder: Path
) -> Iterator[Sample]:
    """Time a step of each probe (`plan/probing/probes.py`) that so many ranks can run. A lone probe
    runs in every process at the same time, because the workers of a run share caches and memory. A
    probe of two ranks trains in its layout.

    Args:
        share_s: seconds of a probe with its engine's start, about.
        quantile: of a step's times, the one that counts.
        folder: where the ranks meet.
    """
    meeting = file_store(folder / "probes", ranks)
    for number, probe in enumerate(probes_for(ranks, device.type == "cpu")):
        alone = probe.ranks == 1
        started = time.monotonic()
        name = f"probe{number}.{rank}" if alone else f"probe{number}"
        config, place = probe.config(device.type), 0 if alone else rank
        store = file_store(folder / name, probe.ranks)
        settings = ConnectSettings(store, device, seconds=_MEETING_TIMEOUT_S, ep=config.layout.ep)
        clock = clock_of(device) if alone else time.perf_counter
        engine = build_engine(config, connect(settings, probe.topology(), place), device)
        engine.initialise(config.seed)
        for step in (1, 2):  # the first one makes what all need
            begin = time.perf_counter()
            one_step(engine, config, step)
            settle(device)
            first_s = time.perf_counter() - begin
        if rank == 0:
            left_s = share_s - (time.monotonic() - started)
            count = min(_MOST_STEPS, max(_FEWEST_STEPS, int(left_s / first_s)))
            meeting.set(f"steps{number}", str(count))
        found = []
        for step in range(3, 3 + int(meeting.get(f"steps{number}"))):
            begin = clock()
            one_step(engine, config, step)
            settle(device)
            found.append(clock() - begin)
        engine.close()
        yield Sample("step", sorted(found)[int(quantile * len(found))], name=probe.name)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock of what a rank computes without other ranks. On a CPU that is its processor
    time, so that other processes of the machine do not count."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main(arguments: list[str]) -> None:
    rank, ranks, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    seconds, name = float(arguments[3]), arguments[4]
    torch.set_num_threads(1)
    kind = device_kind(name)
    device = torch.device(kind.device(rank))
    if kind.is_host:  # as a worker does
        same_products_on_any_threads()
        keep_freed_memory()
    else:
        same_kernels_each_time(compiled=False)
    select_device(device)
    group = None
    if ranks > 1:
        backend = "gloo" if kind.is_host else f"cpu:gloo,{kind.name}:{kind.inside}"
        store = file_store(folder / "store", ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        group = dist.new_group(backend="gloo")
    probes = len(probes_for(ranks, kind.is_host))
    singly = count_operations(kind.is_host, ranks)
    operations = singly + probes
    _print(rank, {"torch": torch.__version__, "operations": operations, "ranks": ranks})
    watch = Stopwatch(device, (1 - OF_STEPS) * seconds / singly, group)
    for sample in measure(watch):
        _print(rank, vars(sample))
        if group is not None:
            dist.barrier(group)  # the next operation begins together
    if group is not None:
        for sample in measure_links(watch, rank, ranks):
            _print(rank, vars(sample))
        dist.destroy_process_group()
    share_s = OF_STEPS * seconds / probes
    for sample in measure_steps(share_s, QUANTILE, device, rank, ranks, folder):
        _print(rank, vars(sample))


def _print(rank: int, value: dict[str, object]) -> None:
    if rank == 0:
        print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
