"""A working run file, changed at random: it is refused in sentences, or it means what it says."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from holdfast.config.loading.fields import all_keys, as_path, leaves
from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.config.loading.no_effect import find_without_effect
from holdfast.core.data.sample_order import BatchSchedule, Mixture
from holdfast.errors import UserError
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.hardware import HardwareInfo, detect_hardware

BASE: dict[str, Any] = {
    "name": "lab",
    "folder": "run",
    "seed": 1,
    "device": "cpu",
    "data": {
        "folder": "dataset",
        "sources": [{"kind": "text", "path": "texts", "weight": 2.0, "name": "a"}],
        "tokenizer": {"vocab_size": 300},
        "sequence_length": 32,
        "validation_fraction": 0.1,
        "deduplicate": True,
    },
    "model": {"preset": None, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
    "train": {
        "steps": 40,
        "batch_size": 4,
        "microbatch_size": 1,
        "batch_warmup": [{"from_step": 1, "batch_size": 2}, {"from_step": 9, "batch_size": 4}],
        "optimizer": {"learning_rate": 3e-3, "betas": [0.9, 0.95]},
        "schedule": {"kind": "wsd", "warmup_steps": 4, "decay_steps": 8},
        "evaluate": {"every": 20, "samples": 8},
    },
    "layout": {"workers": 2},
    "checkpoint": {"every_steps": 10, "slots": "auto"},
    "cluster": {"standbys": "auto", "min_nodes": 1},
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 7, 10**30, -(10**30), 1.5, -0.5, 1e300, 5e-324),
    *(float("inf"), float("nan"), "", " ", "x", "auto", "1e3", "0x10", "1,000", "yes", "-", "~"),
    *("~nobody/x", "$HOME/x", "a/../../b", "/dev/null/x", "s3://b/p", "127.0.0.1:1", "é" * 200),
    *("{name}", "{nmae}", "\u2028", [], [1], [[]], [None], {}, {"x": 1}, {"steps": 3}),
    [{"kind": "text"}],
]
CHANGES = 200


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and item of a tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*prefix, key))
        if isinstance(inner, dict | list):
            found += paths_of(inner, (*prefix, key))
    return found


def mutated(rng: random.Random) -> tuple[str, str]:
    """(what was done, the text of a run file)."""
    tree = copy.deepcopy(BASE)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(paths_of(tree))
        holder: Any = tree
        for part in path[:-1]:
            holder = holder[part]
        how = rng.choice(("remove", "odd", "odd", "odd", "scale", "rename", "add", "double"))
        done.append(f"{how} {path}")
        if how == "remove":
            del holder[path[-1]]
        elif how == "odd":
            holder[path[-1]] = rng.choice(ODD)
        elif how == "scale" and isinstance(holder[path[-1]], int | float):
            holder[path[-1]] *= rng.choice((-1, 0, 0.5, 2, 3, 1000, 1e9))
        elif how == "rename" and isinstance(holder, dict):
            holder[str(path[-1])[:-1] + rng.choice("xs")] = holder.pop(path[-1])
        elif how == "add":
            key = rng.choice([k for k, _ in all_keys() if "*" not in k]).split(".")
            if isinstance(tree.get(key[0]), dict) and len(key) == 2:
                tree[key[0]][key[1]] = rng.choice(ODD)
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
        if how == "double":
            lines = text.splitlines()
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            return ", ".join(done), "\n".join(lines) + "\n"
        if not isinstance(tree, dict) or not tree or not paths_of(tree):
            break
    return ", ".join(done), yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)


def prepared_start(text: str, machine: HardwareInfo) -> LoadedConfig:
    """All that `holdfast train` does with a run file before it reads the data."""
    loaded = plan_for_machine(resolve_config(text, "run.yaml", (), "folder"), Facts(machine))
    train = loaded.config.train
    BatchSchedule(train.batch_size, [(s.from_step, s.batch_size) for s in train.batch_warmup])
    Mixture([source.weight for source in loaded.config.data.sources])
    for sentence in find_without_effect(loaded):
        assert "; " in sentence, sentence
    return loaded


def says_the_same(text: str, loaded: LoadedConfig) -> bool:
    """Is every value that the file gives the one that the run has?"""
    dumped = loaded.config.model_dump(mode="json")
    for key, value in leaves(yaml.safe_load(text)):
        there: Any = dumped
        for part in as_path(key):
            there = there[part]
        is_path = key in ("folder", "data.folder") or key.endswith(".path") or "notices" in key
        if key == "layout.workers" and value == 0:
            continue  # planned
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if plain and not is_path and not isinstance(there, str) and float(there) != float(value):
            return False
    return True


@pytest.fixture(scope="module")
def machine() -> HardwareInfo:
    return detect_hardware()


@settings(max_examples=CHANGES, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_changed_run_file_is_refused_or_means_what_it_says(
    seed: int, machine: HardwareInfo
) -> None:
    """A failure prints the seed."""
    done, text = mutated(random.Random(seed))
    event(done.split()[0])
    told = f"seed {seed}: {done}\n{text}"
    try:
        loaded = prepared_start(text, machine)
    except UserError as refusal:
        error = refusal
    except Exception as fault:
        raise AssertionError(f"{type(fault).__name__}: {fault}\n{told}") from fault
    else:
        assert says_the_same(text, loaded), told
        return
    assert error.exit_code == 2, told
    for sentence in str(error).split("\n"):
        _, colon, rest = sentence.partition(": ")
        assert colon, f"no place: {sentence}\n{told}"
        assert ";" in rest or ": " in rest, f"no remedy: {sentence}\n{told}"
        assert len(sentence) < 700, told
