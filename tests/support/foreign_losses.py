"""Losses of a run that continues a fixture of another trainer, and the trainer's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.interop.dcp_import import import_flat
from holdfast.checkpoint.interop.hf_trainer import ForeignState
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.huggingface.convert import from_their_config
from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.parallel.torch_compat import memory_store
from tests.support import foreign_trainers as theirs
from tests.support.memory_store import MemoryStore
from tests.support.ranks import ROOT
from tests.support.tiny_training import Fed, engine

FIXTURES = ROOT / "tests/runtime/checkpoint/interop/fixtures"
SCHEDULES: dict[str, dict[str, Any]] = {
    "trainer": {"kind": "cosine", "warmup_steps": 4, "final_ratio": 0.0, "counts_from": 0},
    "deepspeed": {"kind": "constant", "warmup_steps": 0},
    "megatron": {"kind": "cosine", "warmup_steps": 4, "counts_from": 0},
    # torchtitan keeps the peak for one step after the warm-up, and decays over all that are left
    "torchtitan": {"kind": "wsd", "warmup_steps": 4, "steps": theirs.STEPS + 1, "decay_steps": 26},
}
DECAYS = dict.fromkeys(("trainer", "torchtitan", "megatron"), theirs.DECAY)
RATES = dict.fromkeys(("torchtitan", "megatron"), theirs.TITAN_RATE)
EVERY = {"match": "*", "weight_decay": theirs.DECAY}


def run_of(name: str) -> RunConfig:
    """The run file that continues a fixture; the state of DeepSpeed is in float32."""
    kind = name if name in SCHEDULES else "deepspeed"
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **theirs.SHAPE}
    if kind == "megatron":
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    model = from_their_config(shape, where="fixture")
    return RunConfig.model_validate(
        {
            "model": model.model_dump(),
            "data": {"sequence_length": theirs.LENGTH},
            "train": {
                "steps": theirs.STEPS,
                "batch_size": theirs.BATCH,
                "microbatch_size": 2,
                "precision": "float64" if kind == "trainer" else "fp32",
                "schedule": SCHEDULES[kind],
                "optimizer": {
                    "learning_rate": RATES.get(kind, theirs.RATE),
                    "betas": list(theirs.BETAS),
                    "weight_decay": DECAYS.get(kind, 0.0),
                    "groups": [EVERY] if kind == "torchtitan" else [],
                    "clip_norm": 0.0 if kind == "megatron" else 1.0,
                },
            },
        }
    )


def losses_after(
    folder: Path, name: str, found: ForeignState, step: int, *, weights_only: bool = False
) -> list[float]:
    """Import, and train the steps after `step` on the fixture's batches."""
    config, store = run_of(name), MemoryStore()
    precision, optimizer = config.train.precision, config.train.optimizer
    options = {"optimizer": optimizer, "weights_only": weights_only}
    commit = import_flat(store, found.state, folder, config.model, precision, **options).commit
    checkpoint = Checkpoint.open(store, commit.key)

    def fill(box: Box, out: torch.Tensor) -> None:
        checkpoint.read(box, out.reshape(-1).view(torch.uint8).numpy().data)

    made = engine(config, 0, memory_store())
    made.load(fill)
    tokens = np.load(FIXTURES / name / "batches.npz")["tokens"].astype(np.int64)
    losses = []
    for number in range(theirs.SAVED + 1, theirs.STEPS + 1):
        rows = torch.from_numpy(tokens[number - 1])
        made.begin(number)
        parts = [rows[at : at + 2] for at in (0, 2)]
        made.compute([Fed(p[:, :-1], p[:, 1:], None, 2 * theirs.LENGTH) for p in parts])
        verdict = made.reduce()
        made.apply(verdict)
        losses.append(verdict.mean_loss)
    made.close()
    return losses


def continues_as(name: str, folder: Path, read: Callable[..., ForeignState]) -> None:
    """The next 20 losses are those of the trainer. read: as `read_hf_trainer`.

    With the weights alone only the first one is, so the moments and the step decide too."""
    written = json.loads((FIXTURES / name / "losses.json").read_text())["losses"]
    due = np.array(written[theirs.SAVED :])
    found = read(folder)
    here = np.array(losses_after(folder, name, found, theirs.SAVED))
    assert len(here) == 20
    assert np.abs(here - due).max() < 1e-6
    bare = read(folder, weights_only=True)
    without = np.array(losses_after(folder, name, bare, 0, weights_only=True))
    assert np.abs(without - due).max() > 1e-4
    assert np.abs(without - due)[0] < 1e-6
