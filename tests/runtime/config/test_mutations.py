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
from holdfast.config.loading.yaml_tree import parse_yaml
from holdfast.core.data.sample_order import BatchSchedule, Mixture
from holdfast.errors import UserError
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from tests.runtime.config.remedy_follower import NoRemedyError, follow, to_yaml

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


# --- remedies, followed to the letter until the file is accepted ----------------------------------
MIXTRAL = {"model.family": "mixtral"}
MOST_ROUNDS = 60  # a file whose sections lost their headings is mended key by key


def follow_until_accepted(text: str, machine: HardwareInfo) -> list[str]:
    """Do what the first sentence says, again and again. Return the sentences.

    Raises AssertionError for a remedy that cannot be followed or that leads back.
    """
    told: list[str] = []
    seen = {text}
    while sentence := first_complaint(text, machine):
        told.append(sentence)
        try:
            text = follow(text, sentence)
        except (NoRemedyError, LookupError, TypeError, AttributeError) as error:
            raise AssertionError(f"cannot be followed: {sentence}\n{text}") from error
        assert text not in seen, f"leads nowhere: {sentence}\n{text}"
        assert len(told) < MOST_ROUNDS, "\n".join([*told, text])
        seen.add(text)
    return told


def first_complaint(text: str, machine: HardwareInfo) -> str | None:
    """Return the first sentence that a start with this run file says; None: it is accepted."""
    try:
        loaded = prepared_start(text, machine)
    except UserError as error:
        return str(error).split("\n")[0]
    return next(iter(find_without_effect(loaded)), None)


@settings(max_examples=CHANGES // 2, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_remedies_of_a_changed_run_file_lead_to_one_that_works(
    seed: int, machine: HardwareInfo
) -> None:
    done, text = mutated(random.Random(seed))
    try:
        follow_until_accepted(text, machine)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {done}\n{error}") from error


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.batch_warmup": [{"from_step": 1, "batch_size": 3}], "train.microbatch_size": 2},
        {"train.batch_warmup": [{"from_step": 9, "batch_size": 2}] * 3},
        {"train.steps": 1e300},
        {"train.steps": True},
        {"train.optimizer": {"betas": [0.9, 7]}},
        {"train.schedule": {"kind": "constant", "final_ratio": 0.5, "decay_steps": 3}},
        {"train.schedule": {"kind": "wsd", "warmup_steps": 50, "decay_steps": 50}},
        {"train.evaluate": {"every": 1000}},
        {"train.memory": {"optimizer": "file"}},
        {"train.memory": {"parameters": "host"}},
        {"train.memory": {"gradients": "host"}, "train.optimizer": {"name": "sgd"}},
        {"data.sources": []},
        {"data.sources": "texts"},
        {"data.sequence_length": 100_000_000},
        {"folder": "file:///shared/run"},
        {"model.heads": 5},
        {"model.kv_heads": 3},
        {"model.dim": 36},
        {"model.head_dim": 7},
        {"model.window_layers": [0, 5]},
        {"model.qk_norm_width": "all", "model.qk_norm": False},
        {"model.rope_fraction": 0.01},
        {"model.preset": "tinny"},
        {"layout.pp": 3},
        {"layout.pp": 2, "layout.stages": [2]},
        {"layout.pp": 2, "layout.stages": [2, 2]},
        {"layout.tp": 3, "layout.workers": 3},
        {"layout.dp_shard": 2},
        {"layout.ep": 2},
        {"layout.tp": 4, "layout.tp_by": {"attention": 3}},
        {"layout.tp": 4, "model.ffn_dim": 26, "layout.tp_by": {"ffn": 4}},
        {**MIXTRAL, "model.experts": {"count": 4, "top_k": 5}},
        {**MIXTRAL, "model.experts": {"scores": "sigmoid"}},
        {**MIXTRAL, "model.experts": {"count": 3}, "layout.ep": 2, "layout.dp_shard": 2},
        {**MIXTRAL, "model.experts": {"count": 6}, "layout.ep": 4, "layout.cp": 2},
        {"layout.pp": 2, "layout.schedule": "interleaved", "layout.virtual_stages": 9},
        {"layout.pp": 2, "layout.schedule": "Zb_V"},
        {"layout.pp": 2, "layout.stages": [2, 0]},
        {"layout.schedule": "zbv"},
        {**MIXTRAL, "model.experts": {"count": 4}, "lora.rank": 4},
        {
            **MIXTRAL,
            "model.experts": {"count": 4},
            "layout.ep": 2,
            "layout.dp_shard": 2,
            "train.recompute": "selective",
        },
        {"layout.workers": 5, "layout.tp": 2},
        {"layout.workers": 9},
        {"layout.trace_step": 99},
        {"checkpoint": {"interval": "adaptive", "min_seconds": 9, "max_seconds": 3}},
        {"checkpoint.every_steps": 5000},
        {"checkpoint.bucket_keep_last": 9},
        {"cluster.loss_jumps": "roll_back", "cluster.recovery": "restart"},
        {"cluster.interface": "0.0.0.0"},
        {"cluster.node": "n" * 70},
        {"cluster.min_nodes": 0},
    ],
    ids=str,
)
def test_remedies_of_rules_over_several_keys(
    overrides: dict[str, Any], machine: HardwareInfo
) -> None:
    tree = parse_yaml(to_yaml(BASE), "run.yaml").value
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    told = follow_until_accepted(to_yaml(tree), machine)
    assert told, "this was no mistake"


def test_a_followed_file_keeps_what_was_right() -> None:
    text = to_yaml(BASE)
    assert parse_yaml(text, "run.yaml").value == BASE
    resolve_config(text, "run.yaml")
