"""`holdfast stitch`: what it writes computes what it should, and names where it is from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from holdfast.data.read.weight_files import weights_checksum
from holdfast.export.weights import folder_decoder
from tests.runtime.cli.conftest import Trained
from tests.support.commands import apart, within

TOKENS = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def steps(trained: Trained, tmp_path: Path) -> dict[int, Path]:
    """By step, the run's model as a folder."""
    for step in (3, 6):
        to = tmp_path / f"step-{step}"
        within("export", trained.folder, "--step", str(step), "--to", to).succeeds()
    return {step: tmp_path / f"step-{step}" for step in (3, 6)}


def tensors(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def provenance(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "stitched.json").read_text())
    return found


def test_an_average_is_the_weighted_mean(
    trained: Trained, steps: dict[int, Path], tmp_path: Path
) -> None:
    run, to = trained.folder, tmp_path / "mean"
    how = "--into", "average", "--weights", "3,1"
    within("stitch", f"{run}@3", steps[6], *how, "--to", to).succeeds()
    one, two, found = tensors(steps[3]), tensors(steps[6]), tensors(to)
    assert found.keys() == one.keys()
    assert all(
        torch.equal(found[name], (0.75 * one[name].double() + 0.25 * two[name].double()).float())
        for name in found
    )
    assert any(not torch.equal(one[name], two[name]) for name in found)
    about = provenance(to)
    first, second = about["sources"]
    assert (first["step"], first["weight"], second["weight"]) == (3, 0.75, 0.25)
    commit = run / first["checkpoint"]
    assert first["checkpoint_sha256"] == hashlib.sha256(commit.read_bytes()).hexdigest()
    assert second["weights_checksum"] == weights_checksum(steps[6])
    assert about["weights_checksum"] == weights_checksum(to)


def test_experts_of_equal_models_compute_what_the_model_does(
    trained: Trained, steps: dict[int, Path], tmp_path: Path
) -> None:
    to = tmp_path / "mixture"
    within("stitch", steps[6], steps[6], steps[6], "--into", "experts", "--to", to).succeeds()
    with torch.no_grad():
        dense, mixture = (folder_decoder(folder)(TOKENS) for folder in (steps[6], to))
    assert torch.allclose(dense, mixture, atol=1e-5)
    assert not torch.equal(dense, mixture)


def test_a_run_begins_with_a_mixture_and_keeps_where_it_is_from(
    trained: Trained, steps: dict[int, Path], tmp_path: Path
) -> None:
    run, mixture, to = trained.folder, tmp_path / "mixture", tmp_path / "again"
    how = "--into", "experts", "--top-k", "1"
    within("stitch", f"{run}@3", f"{run}@6", *how, "--to", mixture).succeeds()
    experts, one, two = tensors(mixture), tensors(steps[3]), tensors(steps[6])
    name = "model.layers.0.mlp.down_proj.weight"
    theirs = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    assert torch.equal(experts[theirs.format(0)], one[name])
    assert torch.equal(experts[theirs.format(1)], two[name])
    given = f"model.from={mixture}", "train.steps=2", "layout.workers=1"
    words: tuple[str | Path, ...] = "train", trained.run_file, f"folder={tmp_path / 'run'}", *given
    assert apart(*words, folder=tmp_path).code == 0
    within("export", tmp_path / "run", "--to", to).succeeds()
    assert provenance(to) == provenance(mixture)
    words = "audit", "record", tmp_path / "run", "--licence", "text=CC0-1.0"
    within(*words).succeeds()
    lines = (tmp_path / "run/record/record.jsonl").read_text().splitlines()
    training = next(entry for entry in map(json.loads, lines) if entry["kind"] == "training")
    assert training["body"]["began_with"] == provenance(mixture)
    once_more = tmp_path / "once-more"
    within("stitch", to, f"{tmp_path / 'run'}@2", "--into", "average", "--to", once_more).succeeds()
    assert [each["began_with"] for each in provenance(once_more)["sources"]] == [
        provenance(mixture)
    ] * 2


def test_parts_come_from_the_runs_that_are_named(
    trained: Trained, steps: dict[int, Path], tmp_path: Path
) -> None:
    run, to = trained.folder, tmp_path / "parts"
    words = "--into", "parts", "--take", f"layers.*.ffn.*={run}@6", "--to", to
    found = json.loads(within("stitch", f"{run}@3", *words, "--json").succeeds().out)
    one, two, here = tensors(steps[3]), tensors(steps[6]), tensors(to)
    taken = {name for name in here if ".mlp." in name}
    assert all(torch.equal(here[n], (two if n in taken else one)[n]) for n in here)
    assert len(found["taken"][f"{run}@6"]) == len(taken)
    moved = sum(not torch.equal(one[name], two[name]) for name in here if name not in taken)
    assert found["left"] == {f"{run}@6": moved}


def test_the_rest_of_a_killed_command_is_replaced(trained: Trained, tmp_path: Path) -> None:
    words = f"{trained.folder}@3", f"{trained.folder}@6", "--into", "average"
    to = tmp_path / "mean"
    left = tmp_path / "mean.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half of it")
    within("stitch", *words, "--to", to).succeeds()
    assert folder_decoder(to)(TOKENS).isfinite().all()
    assert not left.exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{run}", "--into", "average"], "alone"),
        (["{run}", "{run}", "--into", "average", "--weights", "1"], "--weights"),
        (["{run}", "{run}", "--into", "average", "--weights", "1,nan"], "--weights"),
        (["{run}", "{run}", "--into", "average", "--weights", "1,x"], "no list"),
        (["{run}", "{run}@4", "--into", "average"], "step 4"),
        (["{run}", "{root}/nothing", "--into", "average"], "nothing"),
        (["{run}", "{run}@3", "--into", "experts", "--top-k", "3"], "--top-k"),
        (["{run}", "{run}@3", "--into", "parts"], "--take"),
        (["{run}", "--into", "parts", "--take", "head={run}@3"], "no tensor"),
        (["{run}", "--into", "parts", "--take", "head"], "--take head"),
        (["{run}", "{run}@3", "--into", "average", "--take", "embed.*={run}"], "--take"),
        (["{run}", "{run}@3", "--into", "average", "--top-k", "2"], "--top-k 2"),
        (
            [
                *("{run}", "--into", "parts", "--take", "embed.*={run}@3"),
                *("--take", "embed.weight={run}@6"),
            ],
            "overlap",
        ),
    ],
)
def test_what_is_refused(trained: Trained, tmp_path: Path, words: list[str], why: str) -> None:
    given = [word.format(run=trained.folder, root=tmp_path) for word in words]
    outcome = within("stitch", *given, "--to", tmp_path / "new")
    assert outcome.code == 2
    assert why in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "new").exists()


def test_other_shapes_are_refused(trained: Trained, steps: dict[int, Path], tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    within("stitch", steps[3], steps[6], "--into", "experts", "--to", mixture).succeeds()
    outcome = within("stitch", steps[3], mixture, "--into", "average", "--to", tmp_path / "new")
    assert outcome.code == 2
    assert "model.experts.count" in outcome.err
