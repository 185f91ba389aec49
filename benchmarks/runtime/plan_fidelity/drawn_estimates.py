"""The estimate of memory against an account of real steps on a CPU, in drawn runs of up to two
ranks. They have documents, adapters, fp16, compiled blocks and windows.

    python -m benchmarks.runtime.plan_fidelity.drawn_estimates [--runs 60] [--first 0]
        [--results FILE]

The file keeps the peak of each run, as a JSON line. A second call with it measures the runs that
it lacks, and compares all of them with the estimate of today.

A run that is not compiled is accounted tensor by tensor (`training/memory/tensor_account.py`).
Compiled code makes its memory itself. So its account is what torch's profiler says of the CPU's
allocator in one step. The tensors that exist before the step are added. What an operation of
aten makes and frees inside of itself is left out, as in the other account. The profiler does not
see the threads that exchange messages, so a compiled run has one rank. Blocks are compiled by
inductor, which needs a C++ compiler on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.support.adapters import write_base
from tests.support.layouts import case, config_of, engine_of, topology_of
from tests.support.ranks import ADDRESS, RankContext, Server, rank_values
from torch.profiler import ProfilerActivity, profile

from holdfast.config.run import RunConfig
from holdfast.data.read.weight_files import weights_checksum
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.lora_task import LoraTask
from holdfast.training.memory.tensor_account import TensorAccount

WITHIN = 0.05
KINDS: tuple[tuple[str, ...], ...] = (
    *(("documents",), ("lora",), ("fp16",), ("compiled",), ("window",)),
    *(("documents", "lora"), ("documents", "compiled"), ("fp16", "compiled")),
    *(("documents", "fp16"), ("lora", "fp16"), ("documents", "lora", "fp16"), ("compiled",)),
)
LAYOUTS = {
    "lora": (*("one",) * 6, "dp2", "zero1.2", "shard2"),
    "": (*("one",) * 4, "dp2", "zero1.2", "shard2", "tp2", "pp2"),
}
TARGETS = (["all-linear"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"])
_DOCUMENT = 48  # tokens of a document, on average


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """The name of a layout (`tests/support/layouts.py`) and changes of its run file."""
    draw, kinds = random.Random(f"{seed}/estimate"), KINDS[seed % len(KINDS)]
    layout = draw.choice(LAYOUTS["lora" if "lora" in kinds else ""])
    layout = "one" if "compiled" in kinds else layout
    heads, head_size = draw.choice([4, 8]), draw.choice([8, 16])
    dim, length = heads * head_size, draw.choice([64, 128, 256])
    size = draw.choice([2, 4])
    changes: dict[str, Any] = {
        "model__layers": draw.choice([2, 3]),
        "model__dim": dim,
        "model__heads": heads,
        "model__kv_heads": draw.choice([2, 4]),
        "model__ffn_dim": 8 * round(dim * draw.choice([0.25, 0.33, 0.5])),
        "model__vocab_size": draw.choice([200, 512, 1031]),
        "model__tied_embeddings": draw.random() < 0.5,
        "data__sequence_length": length,
        "train__microbatch_size": size,
        "train__batch_size": size * draw.choice([2, 4]),
        "train__recompute": draw.choice(["none", "none", "full"]),
        "layout__bucket_mb": draw.choice([0.02, 6.6]),
    }
    if "documents" in kinds:
        changes["data__attention"] = "document"
    if "lora" in kinds:
        changes |= {"lora__rank": draw.choice([4, 16]), "lora__base": "base"}
        changes |= {"lora__targets": draw.choice(TARGETS)}
    if "compiled" in kinds:
        changes["train__compile"] = True
    if "window" in kinds:
        changes["model__window"] = length // 4
    precision = "fp16" if "fp16" in kinds else draw.choice(["fp32", "bf16"])
    return f"{precision}.{layout}", changes


@dataclass
class AllocatorAccount:
    """Peak of what the CPU's allocator gave out while a function ran, above what was there."""

    peak: int = 0
    _live: int = field(default=0, init=False)

    def measure(self, run: Callable[[], None]) -> None:
        """Run it under torch's profiler."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
        found: list[tuple[int, int, int, int]] = []
        results: Any = profiled.profiler
        pending = list(results.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending += event.children
            kind, fields = event.typed
            if str(kind).endswith("Allocation"):
                parent = event.parent
                inside = parent is not None and parent.name.startswith("aten::")
                end = parent.end_time_ns if inside else 0
                found.append((event.start_time_ns, fields.alloc_size, fields.ptr, end))
        self._add(sorted(found))

    def _add(self, events: list[tuple[int, int, int, int]]) -> None:
        """Events: (time, bytes, address, end of the operation of aten that it is in)."""
        begun: dict[int, tuple[int, int]] = {}
        inside: set[int] = set()  # indices of what an operation frees itself
        for index, (at, size, address, end) in enumerate(events):
            if size > 0:
                begun[address] = index, end
            elif address in begun:
                first, until = begun.pop(address)
                if at <= until:
                    inside |= {first, index}
        for index, (_, size, _, _) in enumerate(events):
            self._live += 0 if index in inside else size
            self.peak = max(self.peak, self._live)


def accounted(
    rank: RankContext, name: str, changes: dict[str, Any], store: str = "run"
) -> tuple[int, int]:
    """(accounted peak, estimate) of this rank, in a step that is not the first."""
    torch.compiler.reset()  # after blocks of other shapes it compiles for any shape, or not at all
    of = case(name)
    config = config_of({**of.changes, **changes})
    config = _with_base(config, rank.folder / f"base{rank.rank}")
    topology, account = topology_of(of, config), TensorAccount()
    with account, torch.compiler.set_stance("force_eager"):
        task = LoraTask(config) if config.lora.rank else None
        made = engine_of(config, topology, rank.rank, rank.store(store), task=task)
        step(made, config, 1)
        for tensor in _buffers(made):
            account.add(tensor)
        account.reset_peak()
        if not config.train.compile:
            step(made, config, 2)
    peak = account.peak
    if config.train.compile:
        step(made, config, 2)
        allocator, before = AllocatorAccount(), account.live_bytes()
        allocator.measure(partial(step, made, config, 3))
        peak = before + allocator.peak
    said = rank_estimate(config, topology, made.groups.coordinate).peak
    made.close()
    return peak, said


def estimated(name: str, changes: dict[str, Any]) -> list[int]:
    """The estimate of each rank."""
    of = case(name)
    config = config_of({**of.changes, **changes})
    topology = topology_of(of, config)
    places = map(topology.coordinate, range(topology.world_size))
    return [rank_estimate(config, topology, at).peak for at in places]


def step(made: StepEngine, config: RunConfig, number: int) -> None:
    """One step on random tokens."""
    rows = config.train.microbatch_size // made.groups.degree("dp_shard")
    shape = (rows, config.data.sequence_length)
    batches = []
    for _ in made.begin(number):
        tokens, documents = torch.randint(config.model.vocab_size, shape), None
        if config.data.attention == "document":
            documents = (torch.rand(shape) < 1 / _DOCUMENT).cumsum(1, dtype=torch.int32)
        batches.append(TensorMicrobatch(tokens, tokens.clone(), documents, [], tokens.numel()))
    made.compute(batches)
    made.apply(made.reduce())


def _with_base(config: RunConfig, folder: Path) -> RunConfig:
    """A run of adapters whose base is in a new folder; any other run as it is."""
    if not config.lora.rank:
        return config
    write_base(folder, config.model)
    lora = {"base": str(folder), "base_checksum": weights_checksum(folder)}
    return config.model_copy(update={"lora": config.lora.model_copy(update=lora)})


def _buffers(made: StepEngine) -> list[torch.Tensor]:
    """Those for messages, some of which another thread makes."""
    reducers: Any = made._gradients
    return [tensor for each in reducers.reducers for tensor in each._scratch.values()]


def compare(name: str, changes: dict[str, Any]) -> list[tuple[int, int]]:
    """(accounted peak, estimate) of each rank."""
    if case(name).world_size == 1:
        with TemporaryDirectory() as folder:
            return [accounted(RankContext(0, 1, Path(folder)), name, changes)]
    arguments = {"name": name, "changes": changes}
    values = rank_values(accounted, case(name).world_size, arguments, deadline=600)
    return [(peak, said) for peak, said in values]


def in_words(seed: int) -> str:
    """A drawn run for a table."""
    name, changes = drawn(seed)
    kinds = " + ".join(KINDS[seed % len(KINDS)])
    sizes = "x".join(str(changes[f"model__{key}"]) for key in ("layers", "dim", "ffn_dim"))
    return f"{name:12} {kinds:24} {sizes:10} recompute {changes['train__recompute']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime.plan_fidelity.drawn_estimates"
    )
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--results", type=Path, help="peaks of runs; continued if it exists")
    options = parser.parse_args()
    torch.set_num_threads(1)
    errors, server, peaks = [], Server(), dict[int, list[int]]()
    os.environ[ADDRESS] = server.address
    results: Path | None = options.results
    if results is not None and results.exists():
        rows = map(json.loads, results.read_text().splitlines())
        peaks = {row["seed"]: row["peaks"] for row in rows}
    for seed in range(options.first, options.first + options.runs):
        if seed not in peaks:
            peaks[seed] = [peak for peak, _ in compare(*drawn(seed))]
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps({"seed": seed, "peaks": peaks[seed]}) + "\n")
        pairs = zip(peaks[seed], estimated(*drawn(seed)), strict=True)
        peak, said = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
        errors.append(100 * abs(said / peak - 1))
        sizes = f"{peak / 1e6:7.2f} {said / 1e6:7.2f} MB  {100 * (said / peak - 1):+5.1f} %"
        print(f"{seed:3} {in_words(seed)}  {sizes}", flush=True)
    print(
        f"{len(errors)} runs, the worst rank of each: mean {statistics.fmean(errors):.1f} %, "
        f"worst {max(errors):.1f} %, {sum(error <= 100 * WITHIN for error in errors)} within 5 %"
    )


if __name__ == "__main__":  # ranks find `accounted` by the module's name
    from benchmarks.runtime.plan_fidelity.drawn_estimates import main as named_main

    named_main()
