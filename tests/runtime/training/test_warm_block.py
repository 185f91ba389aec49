"""A block that was run ahead: the first step compiles nothing more, and its bits are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from holdfast.config.run import RunConfig
from holdfast.training.recover.warm_block import has_room, has_warm_block
from tests.support.ranks import ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(compiled: bool = True, **changes: Any) -> RunConfig:
    model = {"preset": None, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    value = {
        "model": {**model, "vocab_size": 300_000, **changes.pop("model", {})},
        "data": {"sequence_length": 48, **changes.pop("data", {})},
        "train": {"batch_size": 4, "microbatch_size": 2, "compile": compiled},
        **changes,
    }
    return RunConfig.model_validate(value)


@pytest.mark.parametrize(
    ("run", "on_cpu", "on_cuda"),
    [
        (config(), True, True),
        (config(compiled=False), False, True),
        (config(layout={"workers": 2}), True, True),
        (config(layout={"workers": 2, "pp": 2}), True, True),
        (config(layout={"workers": 2, "tp": 2}), False, False),
        (config(layout={"workers": 2, "dp_shard": 2}), False, False),
        (config(layout={"workers": 2, "dp_shard": 2, "zero": 1}), True, True),
    ],
)
def test_which_runs_have_a_block_that_can_be_run_ahead(
    run: RunConfig, on_cpu: bool, on_cuda: bool
) -> None:
    assert has_warm_block(run, CPU) == on_cpu
    assert has_warm_block(run, CUDA) == on_cuda


@pytest.mark.parametrize(("free", "due"), [(30, True), (25, True), (24, False)])
def test_a_block_needs_a_quarter_of_the_devices_memory(
    free: int, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free, 100))
    assert has_room(CUDA) == due
    assert has_room(CPU)


SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from holdfast.config.run import RunConfig
from holdfast.training.measure.equal_steps import lone_engine, one_step
from holdfast.training.recover.warm_block import run_block
torch.set_num_threads(1)
config = RunConfig.model_validate_json(sys.argv[1])
if sys.argv[2] == "warm":
    run_block(config, torch.device("cpu"))
before = counters["stats"]["unique_graphs"]
state = torch.random.get_rng_state().sum().item()
engine = lone_engine(config, torch.device("cpu"))
engine.initialise(config.seed)
losses = [one_step(engine, config, step).mean_loss.hex() for step in (1, 2)]
sums = [local.tensor.double().sum().item().hex() for local in engine.state()]
print(json.dumps([before, counters["stats"]["unique_graphs"] - before, losses + sums, state]))
"""


def first_steps(run: RunConfig, how: str) -> tuple[int, int, list[str], int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, run.model_dump_json(), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, values, state = json.loads(done.stdout)
    return before, after, values, state


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        config(model={"vocab_size": 350_000, "layers": 3}),  # chunks of 64 tokens, and one of 32
        config(data={"attention": "document"}, model={"vocab_size": 500}),
    ],
    ids=["chunks", "documents"],
)
def test_the_first_step_of_a_warm_process_compiles_nothing(run: RunConfig) -> None:
    cold, warm = first_steps(run, "cold"), first_steps(run, "warm")
    assert cold[0] == 0
    assert warm[:2] == (cold[1], 0)
    assert warm[2:] == cold[2:]
