"""Adapters under tensor and pipeline axes: losses and adapters are those of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config.run import RunConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.adapters import refuse_bare_stage
from holdfast.data.read.weight_files import weights_checksum
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.errors import ConfigError
from holdfast.training.engine.lora_task import LoraTask
from tests.support.adapters import write_base
from tests.support.layouts import (
    VOCABULARY,
    assert_all_state,
    case,
    config_of,
    engine_for,
    load_complete,
    model_flags,
    of_one_model,
    pieces,
    save_pieces,
)
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import LENGTH, feed

STEPS = 3
ADAPTERS: dict[str, Any] = {"lora__rank": 4, "lora__alpha": 8}
LAYOUTS = [
    "tp2",
    "pp2-tp2",
    *map(
        in_campaign,
        (
            "pp2",
            "plain.tp2",
            "heads.tp4",
            "dp2-tp2",
            "shard2-tp2",
            "zero1.2-pp2",
            "cp2-tp2",
            "pp2+tp2",
            "gpipe.pp2",
            "interleaved.pp2",
            "zbv.pp2",
            "zbh1.pp2",
            "dualpipev.pp2",
            "full.pp2-tp2",
            "selective.zbv.pp2",
            "cut.plain.tp2",
            "compiled.tp2",
            "biased.tp2",
            "gemma.pp2-tp2",
            "untied.pp2-tp2",
            "documents.pp2",
        ),
    ),
]


def _config(base: Path, name: str, **changes: Any) -> RunConfig:
    """A run of adapters; its base is written if it does not exist."""
    given = {**case(name).changes, **ADAPTERS, "lora__base": str(base), **changes}
    config = config_of(given)
    if not base.exists():
        write_base(base, config.model)
    return config_of({**given, "lora__base_checksum": weights_checksum(base)})


def _curve(rank: RankContext, base: Path, name: str, changes: dict[str, Any]) -> list[float]:
    """Losses. The state goes into the folder of the ranks."""
    config = _config(base, name, **changes)
    made = engine_for(rank, name, config, task=LoraTask(config))
    assert all(not each.requires_grad for each in made.objective.buffers())
    place, shards = made.groups.coordinate, made.groups.degree("dp_shard")
    apart, losses = config.data.attention == "document", []
    for step in range(1, STEPS + 1):
        batches = []
        for leaf in made.begin(step):
            fed = feed(step, leaf, 4, place.dp_shard, shards, VOCABULARY, LENGTH, apart)
            key = key_seed(step, "test", leaf) if config.lora.dropout else None
            held = fed.inputs, fed.targets, fed.documents
            batches.append(TensorMicrobatch(*held, [], fed.tokens, key))
        made.compute(batches)
        verdict = made.reduce()
        made.apply(verdict)
        losses.append(verdict.mean_loss)
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    made.close()
    assert len(set(losses)) == STEPS
    return losses


def _compare(folder: Path, name: str, **changes: Any) -> list[float]:
    """Train by the layout, and by one worker; return the losses of the latter."""
    (name,) = of_one_model(name)
    alone = f"{model_flags(name)}one"
    _config(folder / "base", name, **changes)
    given = {"base": folder / "base", "changes": changes}
    (expected,) = rank_values(_curve, 1, {**given, "name": alone}, folder=folder)
    whole, size = load_complete(folder / "0.npz"), case(name).world_size
    for losses in rank_values(_curve, size, {**given, "name": name}, folder=folder):
        assert losses == pytest.approx(expected, rel=1e-10)
    assert_all_state(whole, [folder / f"{rank}.npz" for rank in range(size)], 1e-10)
    found: list[float] = expected
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_adapters_of_a_layout_are_those_of_one_worker(tmp_path: Path, name: str) -> None:
    """With dropout, if each rank has complete samples."""
    has_parts = any(word in name for word in ("shard", "zero", "cp2", "compiled"))
    _compare(tmp_path, name, lora__dropout=0.0 if has_parts else 0.3)


@pytest.mark.parametrize("name", ["tp2", *map(in_campaign, ("pp2", "pp2-tp2", "shard2-tp2"))])
def test_a_base_in_4_bits_is_cut_as_any_other(tmp_path: Path, name: str) -> None:
    """Each rank rounds its part of a matrix as the complete one is rounded."""
    wide = {"model__dim": 128, "model__ffn_dim": 256}
    losses = _compare(tmp_path, name, lora__base_dtype="nf4", **wide)
    alone = f"{model_flags(*of_one_model(name))}one"
    given = {"base": tmp_path / "base", "changes": wide, "name": alone}
    (plain,) = rank_values(_curve, 1, given, folder=tmp_path)
    assert min(abs(a / b - 1) for a, b in zip(losses, plain, strict=True)) > 1e-6


@pytest.mark.parametrize("name", ["zbv.pp2", in_campaign("interleaved.pp2")])
def test_a_stage_may_be_without_adapters_if_its_worker_has_some(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name, lora__targets=["layers.3.*", "layers.2.*"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout__tp": 2, "layout__tp_by": {"attention": 1}}, r"tp_by\.attention 1 cuts .* use 0"),
        ({"layout__pp": 2, "layout__schedule": "pipedream"}, "work with lora.rank: use .* 1f1b"),
        ({"layout__cp": 2, "lora__dropout": 0.1}, "lora.dropout 0.1 draws .* use lora.dropout 0"),
        (
            {"layout__tp": 2, "lora__base_dtype": "nf4", "model__dim": 64, "model__ffn_dim": 128},
            "heads x head_dim 64 / layout.tp 2 is none: use lora.base_dtype: compute",
        ),
        ({"layout__tp": 3}, "tp 3 does not divide model.heads 4: use 2 or 4"),
        (
            {
                "layout__tp": 2,
                "train__precision": "fp32",
                "train__optimizer": {"state_dtype": "8bit"},
            },
            "tp 2 of adapters does not work with .* 8bit: use state_dtype bf16",
        ),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of({**ADAPTERS, **changes})


def test_a_worker_without_adapters_is_refused() -> None:
    config = config_of({**ADAPTERS, "lora__targets": ["layers.0.*"]})
    refuse_bare_stage(config.model, config.lora, (0, 1), "lora.targets")
    with pytest.raises(ConfigError, match=r"blocks 2, 3, .* use layout\.pp 1, or"):
        refuse_bare_stage(config.model, config.lora, (2, 3), "lora.targets")
