"""The remedies of messages about a run file, followed to the letter until the file is accepted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.no_effect import find_without_effect
from holdfast.config.loading.yaml_tree import parse_yaml
from holdfast.errors import UserError
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from tests.runtime.config.remedy_follower import NoRemedyError, follow, to_yaml
from tests.runtime.config.test_mutations import BASE, CHANGES, mutated, prepared_start

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


@pytest.fixture(scope="module")
def machine() -> HardwareInfo:
    return detect_hardware()


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
