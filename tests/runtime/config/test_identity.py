"""Which changes make another run."""

from __future__ import annotations

import pytest

from holdfast.config.loading.identity import (
    config_differences,
    config_hash,
    earlier_hash,
    refuse_other_run,
)
from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError


def config(*overrides: str) -> RunConfig:
    return resolve_config(None, "command line", overrides).config


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "folder=elsewhere",
        "device=cpu",
        "layout.workers=4",
        "checkpoint.every_steps=7",
        "layout.pp=3",
        "layout.tp=2",
        "layout.replicas=[{pp: 2}, {tp: 2}]",
        "layout.zero=1",
        "cluster.heartbeat_seconds=1",
        "tensorboard=true",
        "logging.trackers=csv,tensorboard",
        "data.folder=elsewhere",
        "train.evaluate.every=3",
        "train.steps=7 train.schedule.steps=1000",
        "model.vocab_size=1024",
    ],
)
def test_where_it_runs_does_not_make_another_run(override: str) -> None:
    other = config(*override.split(" ")) if "[" not in override else config(override)
    assert config_hash(other) == config_hash(config())
    refuse_other_run(config().model_dump(mode="json"), other, "runs/x")


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "train.steps=7",
        "train.batch_size=32",
        "train.microbatch_size=4",
        "model.layers=4",
        "train.precision=bf16",
        "train.optimizer.clip_norm=0",
        "data.sequence_length=64",
        "data.sources.0.weight=2",
        "data.attention=document",
    ],
)
def test_what_it_computes_does(override: str) -> None:
    assert config_hash(config(override)) != config_hash(config())
    key, _, value = override.partition("=")
    with pytest.raises(RunFolderError) as caught:
        refuse_other_run(config().model_dump(mode="json"), config(override), "runs/x")
    said = str(caught.value)
    assert said.startswith("runs/x: this run folder belongs to another configuration")
    assert key in said
    assert value in said
    assert "--fresh" in said


def test_many_differences_are_counted() -> None:
    stored = config().model_dump(mode="json")
    other = config("seed=2", "train.steps=3", "model.layers=5", "model.dim=64", "model.ffn_dim=8")
    with pytest.raises(RunFolderError, match="and 2 more"):
        refuse_other_run(stored, other, "runs/x")


def test_added_and_removed_sources_are_differences() -> None:
    two = config("data.sources=[{kind: python-stdlib}, {kind: text, path: a}]")
    forth = {d.key for d in config_differences(config().model_dump(mode="json"), two)}
    back = {d.key for d in config_differences(two.model_dump(mode="json"), config())}
    assert forth == back
    assert "data.sources.1.path" in forth


def test_a_key_that_the_older_folder_did_not_have_counts_as_its_default() -> None:
    stored = config().model_dump(mode="json")
    del stored["train"]["optimizer"]["eps"]
    stored["train"]["from_the_future"] = 3
    assert config_differences(stored, config()) == []
    (found,) = config_differences(stored, config("train.optimizer.eps=1e-6"))
    assert (found.key, found.there, found.here) == ("train.optimizer.eps", 1e-8, 1e-6)


CONSTANT = "train.schedule.kind=constant"


def test_without_a_schedule_a_run_of_any_length_is_the_same_run() -> None:
    short, long = config(CONSTANT, "train.steps=5"), config(CONSTANT, "train.steps=500")
    assert config_hash(short) == config_hash(long)
    refuse_other_run(short.model_dump(mode="json"), long, "runs/x")
    assert earlier_hash(short) not in (None, config_hash(short), earlier_hash(long))
    assert earlier_hash(config()) is None, "the length of a schedule has been in it always"


def test_a_longer_schedule_names_both_ways_to_a_longer_run() -> None:
    stored, branch = config().model_dump(mode="json"), "holdfast branch runs/x --at 50 --to y"
    with pytest.raises(RunFolderError) as caught:
        refuse_other_run(stored, config("train.steps=2000"), "runs/x", branch)
    said = str(caught.value)
    assert "train.schedule.steps was 1000 and is now 2000, as train.steps is" in said
    assert "keep it with train.schedule.steps=1000" in said
    assert said.endswith(branch)
    kept = config("train.steps=2000", "train.schedule.steps=1000")
    refuse_other_run(stored, kept, "runs/x")


def test_no_branch_is_named_where_no_checkpoint_fits() -> None:
    stored = config().model_dump(mode="json")
    other = config("seed=2", "train.optimizer.learning_rate=1e-4")
    with pytest.raises(
        RunFolderError, match="no checkpoint of the run fits another seed"
    ) as caught:
        refuse_other_run(stored, other, "runs/x", "holdfast branch runs/x")
    assert "holdfast branch" not in str(caught.value)


def test_another_vocabulary_is_another_model() -> None:
    stored = config("model.vocab_size=300").model_dump(mode="json")
    with pytest.raises(RunFolderError, match=r"vocab_size was 300 and is now 400"):
        refuse_other_run(stored, config("model.vocab_size=400"), "runs/x")
