"""`holdfast data show | list | versions | diff`, and a version that its recipe gives again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.stages import StageConfig
from holdfast.data.prepare import stage_recipes
from holdfast.data.read.files import checksum
from holdfast.data.stream.dataset import RECIPE, REMOVED, Dataset
from holdfast.data.stream.versions import compare_recipes
from holdfast.launch.run.runs import open_run
from tests.runtime.cli.conftest import Trained
from tests.runtime.cli.test_who_read import steps_by_text
from tests.runtime.data.test_stages import corpus, lines_file, name_of, removed
from tests.support.commands import within
from tests.support.corpus import make, tree
from tests.support.stage_texts import page

FUNCTION = 'def tidy(text):\n    return text.replace("river", "brook")\n'


def full_corpus(folder: Path) -> dict[str, Any]:
    """The data section of a run file with files of all kinds."""
    sources = corpus(folder, 30)
    (folder / "own.py").write_text(FUNCTION)
    (folder / "quiz.txt").write_text(page(5))
    return {
        "sources": sources,
        "processes": 1,
        "tokenizer": {"vocab_size": 300, "sample_bytes": 20_000},
        "shard_tokens": 2000,
        "sequence_length": 16,
        "deduplicate": "within_source",
        "stages": [
            {"kind": "gopher", "sources": ["web"], "skip_rules": ["long"]},
            {"kind": "function", "function": f"{folder}/own.py:tidy"},
            {"kind": "contamination", "texts": [{"path": f"{folder}/quiz.txt"}], "ngram_words": 8},
            {"kind": "personal_data"},
            {"kind": "near_duplicates", "similarity": 0.75},
        ],
    }


def prepared(path: Path, data: dict[str, Any], folder: Path) -> Dataset:
    path.write_text(yaml.safe_dump({"data": data}))
    done = within("data", "prepare", path, f"data.folder={folder}")
    assert done.code == 0, done.err
    return Dataset.open(folder)


def test_a_version_is_rebuilt_from_its_recipe_and_one_byte_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = full_corpus(tmp_path / "in")
    first = prepared(tmp_path / "run.yaml", data, tmp_path / "sets" / "a")
    recipe = tmp_path / "clean" / "recipe.yaml"
    recipe.parent.mkdir()
    shutil.copy(first.folder / RECIPE, recipe)
    within("data", "prepare", recipe).succeeds()
    again = Dataset.open(recipe.parent / "rebuilt")
    assert again.version == first.version
    ours, theirs = tree(first.folder), tree(again.folder)
    assert ours == theirs
    same = within("data", "diff", first.folder, again.folder)
    assert (same.code, "the same version" in same.out) == (0, True)

    def changed(name: str, *overrides: str) -> list[tuple[str, str]]:
        folder = tmp_path / "sets" / name
        within("data", "prepare", recipe, f"data.folder={folder}", *overrides).succeeds()
        other = Dataset.open(folder)
        assert other.version != first.version
        assert within("data", "diff", first.folder, folder).code == 1
        return [(one.what, one.where) for one in compare_recipes(first, other)]

    assert changed("parameter", "data.stages.4.similarity=0.76") == [
        ("parameter", "data.stages[4] (near_duplicates).similarity")
    ]
    notes = tmp_path / "in" / "notes.jsonl"
    before = notes.read_text()
    notes.write_text(before.replace("short note", "Short note", 1))
    assert changed("input") == [("input", "source notes")]
    notes.write_text(before)
    for name, what, place in (
        ("own.py", "input", "data.stages[1] (function).files"),
        ("quiz.txt", "input", "data.stages[2] (contamination).files"),
    ):
        path = tmp_path / "in" / name
        before = path.read_text()
        path.write_text(before + "\n")
        assert changed(path.stem) == [(what, place)]
        path.write_text(before)
    digest = stage_recipes.code_digest
    monkeypatch.setattr(
        stage_recipes,
        "code_digest",
        lambda kind: digest(kind) if kind != "gopher" else checksum(digest(kind).encode()),
    )
    assert changed("code") == [("code", "data.stages[0] (gopher).code")]

    listed = json.loads(within("data", "list", tmp_path / "sets", "--json").out)["datasets"]
    assert {Path(row["folder"]).name for row in listed} == {
        *("a", "parameter", "input", "own", "quiz", "code")
    }
    found = json.loads(within("data", "versions", first.folder, "--json").out)["versions"]
    assert found[0]["version"] == first.version
    assert len({row["version"] for row in found}) == len(found) == 6
    assert all(row["differs"] for row in found[1:])
    assert "stages[4]" in within("data", "versions", first.folder).out
    assert first.version in within("data", "list", tmp_path / "sets").out


def test_a_removed_document_gives_a_version_and_the_runs_that_read_it(
    trained: Trained, tmp_path: Path
) -> None:
    run = open_run(trained.folder)
    text, steps = next((t, s) for t, s in steps_by_text(trained).items() if s)
    stage = StageConfig.model_validate({"kind": "remove", "documents": [name_of(text)]})
    config: DataConfig = run.config.data.model_copy(
        update={"folder": str(tmp_path / "without"), "stages": (stage,)}
    )
    after = make(config)
    arguments = ("data", "diff", run.dataset_location, after.folder, "--run", trained.folder)
    done = within(*arguments, "--json")
    assert done.code == 1
    found = json.loads(done.out)
    gone = found["only_before"]
    assert [row["document"] for row in gone] == [name_of(text)]
    assert gone[0]["cause"] == "stage 0 (remove)"
    assert found["only_after"] == []
    assert found["runs"][str(trained.folder)]["steps"] == steps
    assert f"run {trained.folder}: steps" in within(*arguments).out


def test_show_prints_samples_of_each_stage_and_tables_without_personal_data(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"data": full_corpus(tmp_path / "in")}))
    done = within("data", "show", run)
    assert done.code == 0, done.err
    assert "stage 0 (gopher): 43 documents, left out 1: short 1" in done.out
    assert "Too short for a page." in done.out
    assert "brook" in done.out
    assert "[EMAIL]" in done.out
    assert "mail.test" not in done.out
    assert not (tmp_path / "rebuilt").exists()
    found = json.loads(within("data", "show", run, "--json").out)["sources"]
    web = found[0]
    assert web["personal_items"] == 5
    assert {stage["kind"] for stage in web["stages"]} == {
        *("gopher", "function", "contamination", "personal_data", "near_duplicates")
    }
    examples = [example for stage in web["stages"] for example in stage["examples"]]
    assert {example["rule"] for example in examples} >= {"short", "tidy", "email", "similarity"}
    few = json.loads(within("data", "show", run, "--json", "--documents", "7").out)["sources"]
    assert [source["documents"] for source in few] == [7, 7]


def test_a_list_that_was_lost_is_written_again(tmp_path: Path) -> None:
    data = full_corpus(tmp_path / "in")
    run = tmp_path / "run.yaml"
    dataset = prepared(run, data, tmp_path / "set")
    before, list_file = removed(dataset), dataset.folder / REMOVED
    arguments = (run, f"data.folder={dataset.folder}")
    for damage in (list_file.unlink, lambda: list_file.write_bytes(b"{}\n")):
        damage()
        failed = within("data", "verify", *arguments)
        assert (failed.code, "data prepare" in failed.out) == (1, True)
        within("data", "prepare", *arguments).succeeds()
        assert removed(dataset) == before
        within("data", "verify", *arguments).succeeds()
    list_file.unlink()
    lines_file(tmp_path / "in" / "web.jsonl", [page(seed) for seed in range(40)])
    within("data", "prepare", *arguments).refuses_last(REMOVED, "changed since")
    assert not list_file.exists()
    assert Dataset.open(dataset.folder).version == dataset.version


def test_places_without_a_dataset_are_refused(tmp_path: Path) -> None:
    within("data", "list", tmp_path / "none").refuses("none", "no such folder")
    within("data", "list", tmp_path).refuses("no dataset")
    for command in (("versions", tmp_path), ("diff", tmp_path, tmp_path)):
        within("data", *command).refuses("no prepared dataset")


def test_a_croissant_file_names_each_file_and_the_stages(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "run.yaml", full_corpus(tmp_path / "in"), tmp_path / "set")
    arguments = ("data", "croissant", dataset.folder, "--license", "CC-BY-4.0")
    within(*arguments).succeeds()
    found = json.loads((dataset.folder / "croissant.json").read_text())
    assert found["version"] == dataset.version
    assert found["license"] == "CC-BY-4.0"
    assert len(found["rai:dataPreprocessingProtocol"]) == 5
    files = {entry["contentUrl"]: entry for entry in found["distribution"]}
    for name, entry in files.items():
        content = (dataset.folder / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert {file.path for file in dataset.files()} < files.keys()
    columns = {field["source"]["extract"]["column"] for field in found["recordSet"][0]["field"]}
    assert all(columns <= line.keys() for line in removed(dataset))
    assert Dataset.open(dataset.folder).version == dataset.version  # it is no part of it


def test_lineage_goes_from_the_sources_to_the_checkpoints(trained: Trained, tmp_path: Path) -> None:
    run = open_run(trained.folder)
    place = run.dataset_location
    done = within("data", "lineage", place, "--run", trained.folder).succeeds()
    events = [json.loads(line) for line in done.out.splitlines()]
    kinds = [(event["job"]["name"], event["eventType"]) for event in events]
    assert kinds[:2] == [("data prepare", "COMPLETE"), ("train", "START")]
    assert set(kinds[2:]) == {("train", "RUNNING")}
    made = events[0]["outputs"][0]
    assert made["facets"]["version"]["datasetVersion"] == Dataset.open(place).version
    assert all(event["inputs"] == [made] for event in events[1:])
    for event in events[2:]:
        assert Path(event["outputs"][0]["name"]).exists()
    assert len({event["run"]["runId"] for event in events}) == 2
    other = prepared(tmp_path / "run.yaml", full_corpus(tmp_path / "in"), tmp_path / "set")
    within("data", "lineage", other.folder, "--run", trained.folder).refuses("another version")
