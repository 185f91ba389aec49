"""`governance.regions`: what lies elsewhere is refused by name, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.errors import ConfigError
from holdfast.export.pruned import PruneRequest, prune
from holdfast.launch.start.regions import (
    note_regions,
    refuse_copy_elsewhere,
    refuse_other_regions,
    refuse_region,
    refuse_visitor_elsewhere,
)
from tests.support.commands import within, write_run_file

HERE = ("governance.regions=[eu-west-1,westeurope]", "checkpoint.machine.zone=eu-west-1b")
HUB = "data.sources=[{kind: huggingface, path: org/texts, name: web}]"
PEER = "checkpoint.peers=[{name: b, address: '10.0.0.2:7600', zone: %s}]"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("checkpoint.machine.zone=us-east-1a", "this machine lies in us-east-1a"),
        ("checkpoint.machine.zone=eu-west-10a", "this machine lies in eu-west-10a"),
        ("checkpoint.machine.zone=''", "in which region this machine lies"),
        (PEER % "us-east-1a", "checkpoint.peers.0.zone lies in us-east-1a"),
        (PEER % "''", "in which region checkpoint.peers.0.zone lies"),
        ("checkpoint.bucket=s3://b/p", "in which region checkpoint.bucket lies"),
        ("checkpoint.bucket=s3://b/p?region=us-east-1", "checkpoint.bucket lies in us-east-1"),
        ("folder=s3://b/run?region=eu-west-2", "folder lies in eu-west-2"),
        ("data.folder=gs://b/data", "in which region data.folder lies"),
        (HUB, "in which region data.sources.0.path lies"),
    ],
)
def test_each_place_elsewhere_is_named(tmp_path: Path, setting: str, said: str) -> None:
    run_file = write_run_file(tmp_path)
    refuse_other_regions(load_config(run_file, [setting]))  # without regions all is allowed
    with pytest.raises(ConfigError, match=said):
        refuse_other_regions(load_config(run_file, [*HERE, setting]))


@pytest.mark.parametrize(
    "setting",
    [
        "checkpoint.machine.zone=westeurope-2",
        PEER % "eu-west-1c",
        "checkpoint.bucket=s3://b/p?region=eu-west-1",
    ],
)
def test_places_inside_are_accepted(tmp_path: Path, setting: str) -> None:
    refuse_other_regions(load_config(write_run_file(tmp_path), [*HERE, setting]))


@pytest.mark.parametrize("words", [("train",), ("data", "prepare"), ("launch", "--on", "local")])
def test_a_start_elsewhere_leaves_nothing_behind(tmp_path: Path, words: tuple[str, ...]) -> None:
    run_file = write_run_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = within(*words, run_file, *HERE, "checkpoint.machine.zone=us-east-1a")
    assert (found.code, "governance.regions allows eu-west-1" in found.err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("zone", "to", "said"),
    [
        ("us-east-1a", "copies", "this machine lies in us-east-1a"),
        ("", "copies", "in which region this machine lies"),
        ("eu-west-1a", "s3://b/copies?region=us-east-1", "s3://b/copies lies in us-east-1"),
        ("eu-west-1a", "s3://b/copies", "in which region s3://b/copies lies"),
        ("eu-west-1a", "mlflow:models", "in which region mlflow:models lies"),
    ],
)
def test_a_copy_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, zone: str, to: str, said: str
) -> None:
    rules = GovernanceConfig(regions=("eu-west-1",))
    monkeypatch.setenv("HOLDFAST_ZONE", zone)
    refuse_copy_elsewhere(GovernanceConfig(), to, "--to")
    with pytest.raises(ConfigError, match=said):
        refuse_copy_elsewhere(rules, to, "--to")
    monkeypatch.setenv("HOLDFAST_ZONE", "eu-west-1b")
    for inside in ("copies", "s3://b/copies?region=eu-west-1"):
        refuse_copy_elsewhere(rules, inside, "--to")


def test_a_pruned_copy_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    note_regions(tmp_path, GovernanceConfig(regions=("eu-west-1",)))
    monkeypatch.setenv("HOLDFAST_ZONE", "us-east-1a")
    request = PruneRequest(tmp_path, tmp_path / "to", "magnitude", 0.5, "", 0, None, 1)
    with pytest.raises(ConfigError, match="this machine lies in us-east-1a"):
        prune(request, print)


def test_a_cloud_is_asked_for_machines_inside_alone() -> None:
    rules = GovernanceConfig(regions=("eu-west-1",))
    refuse_region(rules, "eu-west-1")
    for region in ("", "us-east-1"):
        with pytest.raises(ConfigError, match="a machine of this order"):
            refuse_region(rules, region)


def test_a_visiting_actor_says_where_it_is() -> None:
    rules = GovernanceConfig(regions=("eu-west-1",))
    refuse_visitor_elsewhere(rules, {"HOLDFAST_PLACE": "rack=r1,zone=eu-west-1a"})
    for environ in ({}, {"HOLDFAST_ZONE": "us-east-1a"}):
        with pytest.raises(ConfigError, match="this machine"):
            refuse_visitor_elsewhere(rules, environ)
