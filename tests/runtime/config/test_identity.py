"""Which changes make another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.loading.fields import all_keys, change_of
from holdfast.config.loading.identity import (
    DATASET_KEYS,
    LATER_KEYS,
    SCHEDULE_STEPS,
    config_differences,
    config_hash,
    decisive_values,
    earlier_hash,
    refuse_other_run,
)
from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.reference import json_schema, markdown
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change
from holdfast.config.sections.model import PRESETS
from holdfast.errors import RunFolderError


def config(*overrides: str) -> RunConfig:
    return resolve_config(None, "command line", overrides).config


def test_a_key_that_was_added_does_not_change_the_hash_of_runs_that_exist() -> None:
    plain = RunConfig.model_validate({"data": {"sources": [{"path": "texts"}]}})
    why = "a new key of class branch or never belongs into LATER_KEYS of loading/identity.py"
    assert config_hash(plain) == "3f3db5cc6479030a0f253a11b804cb32", why


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
    assert "train.schedule.steps was 1000 and would be 2000" in said
    assert "keep them with train.schedule.steps=1000" in said
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


# --- what a change of each key does ---------------------------------------------------------------
KEYS = [key for key, _ in all_keys()]
LISTS = {
    "data": {"sources": [{"kind": "text", "path": "a"}]},
    "train": {
        "batch_warmup": [{"from_step": 5, "batch_size": 8}],
        "optimizer": {"groups": [{"match": "*"}]},
    },
    "model": {"rope_scaling": {"factor": 4.0}},
    "layout": {"replicas": [{}]},
    "checkpoint": {"peers": [{"name": "b", "address": "127.0.0.1:1"}]},
}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_has_a_class(key: str) -> None:
    assert change_of(key) is not None, (
        "declare it: InPlace, Branch or Never (config/sections/base.py)"
    )


def test_an_unknown_key_has_none() -> None:
    assert change_of("train.no_such_key") is None


def test_a_key_has_the_class_of_its_section_unless_it_declares_another() -> None:
    assert change_of("checkpoint.keep_last") is Change.IN_PLACE
    assert change_of("train.optimizer.eps") is Change.BRANCH
    assert change_of("train.batch_warmup.3.from_step") is Change.BRANCH
    assert change_of("model.rope_scaling.factor") is Change.NEVER
    assert change_of("data.sources.0.weight") is Change.NEVER
    assert change_of("data.processes") is Change.IN_PLACE


def test_what_may_change_in_place_is_no_part_of_the_identity_and_all_else_is() -> None:
    dumped = RunConfig.model_validate(LISTS).model_dump(mode="json")
    # A later key enters the identity only with another value than its default.
    decisive = {_general(key) for key in decisive_values(dumped)}
    changed = {key for key in KEYS if change_of(key) is not Change.IN_PLACE}
    assert decisive <= changed
    missing = changed - decisive - set(DATASET_KEYS) - set(LATER_KEYS)
    parts = (
        "data.mix.",
        "data.stages.",
        "data.features.",
        "model.",
        "rollout.rewards.*.",
        "rollout.prompts.*.",
    )  # of later keys that are lists
    later = {f"data.sources.*.{name}" for name in ("rows", "bad_rows", "at_end", "passes", "media")}
    assert {key for key in missing if not key.startswith(parts)} == later
    assert SCHEDULE_STEPS in decisive


def test_the_page_names_the_class_of_each_key() -> None:
    tables = [line.split(" | ") for line in markdown().splitlines() if line.startswith("| `")]
    named = {cells[0]: cells[3] for cells in tables if len(cells) == 5}
    assert len(named) > 100
    assert set(named.values()) == {change.value for change in Change}


def test_the_page_lists_each_class() -> None:
    _, _, table = markdown().partition("| in place | `holdfast train` ")
    in_place, _, table = table.partition("| branch | `holdfast train` ")
    branch, *_ = table.partition("| never | ")
    assert "`train.steps`" in in_place
    assert "`cluster.*`" in in_place
    assert "`train.optimizer.groups.*`" in branch
    assert "| `train.optimizer.name` | text | `'adamw'` | never |" in markdown()
    assert "| `seed` | whole number, ≥ 0 | `1` | never |" in markdown()


def _general(key: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in key.split("."))


# --- the schema for editors, and the page for people ----------------------------------------------
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "run-file.md"


def meanings_of_keys() -> dict[str, str]:
    """Each key of the page, with what it says of it."""
    rows = [row.split(" | ") for row in markdown().splitlines() if row.startswith("| `")]
    return {row[0].strip("| `").replace("<n>", "*"): row[-1].strip(" |") for row in rows}


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "run: make docs"


def test_every_key_is_on_the_page() -> None:
    page = markdown()
    missing = [key for key, _ in all_keys() if f"`{key.replace('*', '<n>')}`" not in page]
    assert missing == []


def test_every_key_has_a_meaning() -> None:
    assert [key for key, meaning in meanings_of_keys().items() if not meaning] == []
    assert "the preset's" not in "".join(
        line for line in markdown().splitlines() if "`train." in line
    )


def test_the_schema_describes_every_section_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert "required" not in schema["$defs"]["ModelConfig"], "a preset gives the shape"


def test_every_preset_is_a_model() -> None:
    for name in PRESETS:
        model = RunConfig.model_validate({"model": {"preset": name}}).model
        assert model.head_size % 2 == 0
        assert model.preset == name
