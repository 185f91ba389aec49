"""`holdfast branch`: what it makes and refuses; a damaged end, and the way out that it names."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.config.loading.load import load_config
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.outer import OuterConfig
from holdfast.config.sections.train import ScheduleConfig, TrainConfig
from holdfast.errors import CheckpointError, RunFolderError
from holdfast.events import RunBranched
from holdfast.launch.run import branch as branch_module
from holdfast.launch.run.resume_checks import (
    branch_command,
    refuse_branch_without_state,
    refuse_unfit_state,
)
from holdfast.launch.run.runs import open_run
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.conftest import Trained
from tests.support.commands import apart, within

RATE = "train.optimizer.learning_rate=1e-4"


@pytest.fixture
def parent(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the finished run, which a test may damage; its checkpoints are of steps 3 and 6."""
    return Path(shutil.copytree(trained.folder, tmp_path / "parent"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def give_bucket(parent: Path, bucket: Path, step: int) -> None:
    """Name a bucket in the run's description, and copy a checkpoint into it."""
    assert within("checkpoint", "copy", parent, str(step), "--to", f"file://{bucket}").code == 0
    path = parent / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["config"]["checkpoint"]["bucket"] = f"file://{bucket}"
    path.write_text(json.dumps(resolved))


def damage(folder: Path, step: int) -> None:
    """Flip bits of one byte in a blob of a step."""
    blob = next(folder.glob(f"data/*/{step:010d}-rank00000-*"))
    data = bytearray(blob.read_bytes())
    data[-100] ^= 0xFF
    blob.write_bytes(data)


# --- the branch -----------------------------------------------------------------------------
@pytest.mark.slow
def test_an_unchanged_branch_ends_like_its_parent_to_the_bit(parent: Path, tmp_path: Path) -> None:
    before = content(parent)
    made = within("branch", parent, "--at", "3", "--to", "twin", "--json")
    assert made.code == 0, made.err
    command = shlex.split(json.loads(made.out)["train"])
    trained = apart(*command[1:])
    assert trained.code == 0, trained.err
    assert within("checkpoint", "diff", parent, "twin").code == 0
    assert content(parent) == before, "the parent is only read"

    audit = within("data", "audit", "twin")
    assert audit.code == 0
    own, of_parent = audit.out.splitlines()
    assert own.startswith("12 samples in 3 steps (4 to 6): none missing, none twice")
    assert of_parent.startswith(f"parent {parent}: 12 samples in 3 steps: none missing")
    numbers = json.loads(within("data", "audit", "twin", "--json").out)
    assert (numbers["first_step"], numbers["last_step"]) == (4, 6)
    assert numbers["parents"][str(parent)]["last_step"] == 3

    report = json.loads(within("report", "twin", "--json").out)
    assert (report["branch"]["parent"], report["branch"]["step"]) == ("tiny", 3)
    assert (report["state"], report["last_step"]) == ("finished", 6)
    assert within("report", "twin").code == 0
    assert "continues <code>tiny</code> after step 3" in (tmp_path / "twin/report.html").read_text()
    again = within("train", "twin/run.yaml")
    assert "this run is finished" in again.err

    shutil.move(parent, tmp_path / "elsewhere")
    audit = within("data", "audit", "twin")
    assert audit.code == 0
    assert f"the steps up to 3, and is no longer in {parent}" in audit.out


def test_its_run_file_has_the_parents_values_and_the_changed_ones(
    parent: Path, tmp_path: Path
) -> None:
    settings = (RATE, "train.steps=20", "checkpoint.keep_last=7", "checkpoint.bucket=copies")
    assert within("branch", parent, "--to", "new", *settings).code == 0
    loaded = load_config(tmp_path / "new" / "run.yaml").config
    old = open_run(parent).config.model_dump(mode="json")
    new = loaded.model_dump(mode="json")
    assert new.pop("branch_of").endswith("@6")
    del old["branch_of"]
    wanted: dict[str, Any] = old | {"name": "new", "folder": str(tmp_path / "new")}
    wanted["train"] = {**old["train"], "steps": 20}
    wanted["train"]["optimizer"] = {**old["train"]["optimizer"], "learning_rate": 1e-4}
    wanted["checkpoint"] = {**old["checkpoint"], "keep_last": 7, "bucket": str(tmp_path / "copies")}
    assert new == wanted
    (event,) = [r.event for r in read_journal(FolderStore("new"))]
    assert isinstance(event, RunBranched)
    assert (event.step, event.folder, event.changed) == (6, str(parent), list(settings))
    assert not (tmp_path / "new" / "secret").exists()
    assert within("checkpoint", "verify", "new").code == 0


def test_relative_paths_of_the_data_start_where_they_did(trained: Trained, parent: Path) -> None:
    def start_in(folder: Path, place: str) -> None:
        resolved = json.loads((parent / "resolved.json").read_text())
        resolved["config"]["data"]["sources"][0]["path"] = "texts"
        resolved["origins"]["data.sources.0.path"] = {"kind": "file", "place": place}
        (parent / "resolved.json").write_text(json.dumps(resolved))
        environment = json.loads((parent / "environment.json").read_text())
        environment = json.dumps(environment | {"folder": str(folder)})
        (parent / "environment.json").write_text(environment)

    def source(run: str) -> str | None:
        return load_config(Path(run) / "run.yaml").config.data.sources[0].path

    start_in(trained.root.parent, f"{trained.root.name}/run.yaml:8")
    assert within("branch", parent, "--at", "3", "--to", "found").code == 0
    assert source("found") == str(trained.root / "texts")
    start_in(trained.root.parent, "run.yaml:8")
    assert within("branch", parent, "--at", "3", "--to", "unknown").code == 0
    assert source("unknown") == "texts", "as it is written: the dataset is prepared"


def test_the_name_of_a_node_is_not_inherited(parent: Path) -> None:
    resolved = json.loads((parent / "resolved.json").read_text())
    resolved["config"]["cluster"] |= {"node": "a", "beat_seconds": 0.5}
    resolved["origins"]["cluster.node"] = {"kind": "command line", "place": "cluster.node=a"}
    (parent / "resolved.json").write_text(json.dumps(resolved))
    assert within("branch", parent, "--at", "3", "--to", "new").code == 0
    cluster = load_config(Path("new/run.yaml")).config.cluster
    assert (cluster.node, cluster.beat_seconds) == ("", 0.5)


def test_a_branch_of_a_branch_is_audited_through_all_parents(parent: Path, tmp_path: Path) -> None:
    assert within("branch", parent, "--at", "3", "--to", "one", RATE).code == 0
    assert within("branch", "one", "--at", "3", "--to", "two").code == 0
    audit = within("data", "audit", "two")
    assert audit.code == 0
    one = tmp_path / "one"
    assert f"parent {one}: no step of its own is committed up to step 3" in audit.out
    assert f"parent of {one}, {parent}: 12 samples in 3 steps" in audit.out


# --- refusals -------------------------------------------------------------------------------
REFUSALS = {
    "train.steps=3": ("train.steps 3 leaves no step after step 3", "train.steps=6"),
    "model.dim=32": ("model.dim cannot change in a branch", "folder=NEW"),
    "seed=2": ("seed cannot change in a branch",),
    "data.sources.0.weight=2": ("data.sources.0.weight cannot change in a branch",),
    "folder=x": ("holdfast branch sets folder itself", "--to"),
    "train.epochs=2": ("holdfast branch sets train.epochs itself", "use train.steps"),
    "branch_of=a@1": ("holdfast branch sets branch_of itself",),
    "train.batch_size=8": (
        "the steps up to 3 were dealt in other batches",
        "train.batch_size=4 'train.batch_warmup=[{from_step: 4, batch_size: 8}]'",
    ),
    "train.precision=float64": ("F32 [300, 16] for model.embed.weight", "F64"),
    "train.step=8": ("unknown key train.step", "train.steps"),
}


@pytest.mark.parametrize("override", REFUSALS)
def test_what_a_branch_cannot_change_is_refused(
    override: str, trained: Trained, tmp_path: Path
) -> None:
    found = within("branch", trained.folder, "--at", "3", "--to", "new", override)
    found.refuses(*REFUSALS[override])
    assert list(tmp_path.iterdir()) == []


def test_another_batch_after_the_step_is_what_the_remedy_says(trained: Trained) -> None:
    found = within("branch", trained.folder, "--at", "3", "--to", "new", "train.batch_size=8")
    remedy = shlex.split(found.err.strip().rpartition("; use ")[2])
    made = within("branch", trained.folder, "--at", "3", "--to", "new", *remedy)
    assert made.code == 0, made.err


def test_places_and_steps_that_cannot_be(trained: Trained, tmp_path: Path) -> None:
    run = trained.folder
    (tmp_path / "full").mkdir()
    within("branch", run, "--at", "3", "--to", "full").refuses("full", "exists", "--to")
    within("branch", run, "--at", "4", "--to", "new").refuses("step 4", "3, 6", "--at")
    within("branch", run, "--at", "x", "--to", "new").refuses("step x", "3, 6")
    within("branch", "no", "--at", "3", "--to", "new").refuses("there is no run here")
    within("branch", run, "--at", "3", "--to", run / "in").refuses("outside of it", "--to")
    within("branch", run, "--at", "3", "--to", "lr{name}").refuses("{name}", "--to")
    (tmp_path / "full" / "file").touch()
    within("branch", run, "--at", "3", "--to", "full/file/new").refuses(
        f"{tmp_path}/full/file/new: {tmp_path}/full/file is a file, not a folder; name another "
        "folder with --to"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("name", ["1e-4", "0000000009", "x #y", "a: b"])
def test_a_branch_may_have_any_name(parent: Path, name: str) -> None:
    assert within("branch", parent, "--at", "3", "--to", name).code == 0
    assert Path(load_config(Path(name, "run.yaml")).config.run_folder) == Path(name).absolute()


def test_the_command_that_a_finished_run_names_makes_a_branch(parent: Path) -> None:
    found = within("train", parent / "run.yaml", "train.optimizer.learning_rate=0.0005")
    command = shlex.split(re.findall(r"holdfast (branch .+)", found.err)[0])
    assert within(*command).code == 0


def test_a_branch_does_not_begin_at_step_0(parent: Path) -> None:
    assert within("branch", parent, "--at", "3", "--to", "new").code == 0
    within("train", "new/run.yaml", "--fresh").refuses("--fresh would begin it at step 0")
    run_file = shutil.copy("new/run.yaml", "kept.yaml")
    shutil.move("new", "moved")
    found = within("train", "moved/run.yaml")
    found.refuses("this branch lies in", "moved now", "add folder=")
    setting = found.err.strip().rpartition("; add ")[2]
    moved = load_config(Path("moved/run.yaml"), shlex.split(setting))
    refuse_branch_without_state(Path(moved.config.run_folder), moved, fresh=False)
    shutil.rmtree("moved")
    within("train", run_file).refuses("its first checkpoint is not here", "holdfast branch")


# --- cut short, damaged, in a bucket --------------------------------------------------------
def test_a_branch_that_is_cut_short_is_resumed_by_the_same_command(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("branch", parent, "--at", "3", "--to", "new", "--json")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(branch_module, "_publish", interrupt)
        assert within(*command).code == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new.branch", "parent"]
    inodes = {p.stat().st_ino for p in (tmp_path / ".new.branch" / "data").rglob("*.safetensors")}
    assert within(*command).code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "parent"]
    assert inodes == {p.stat().st_ino for p in (tmp_path / "new" / "data").rglob("*.safetensors")}
    assert len(read_journal(FolderStore("new"))) == 1


def test_what_another_command_left_is_not_used(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(branch_module, "_publish", interrupt)
        assert within("branch", parent, "--at", "3", "--to", "new").code == 130
    assert within("branch", parent, "--at", "6", "--to", "new", "train.steps=9").code == 0
    assert [step_of(key) for key in list_commits(FolderStore("new"))] == [6]


def test_a_damaged_checkpoint_makes_no_branch(parent: Path, tmp_path: Path) -> None:
    damage(parent, 3)
    found = within("branch", parent, "--at", "3", "--to", "new")
    found.refuses("step 3 cannot be copied", "checksum", "holdfast checkpoint verify")
    assert found.err.count(";") == 1, "one remedy"
    assert [path.name for path in tmp_path.iterdir()] == ["parent"]


def test_the_bucket_has_what_the_folder_has_not(parent: Path, tmp_path: Path) -> None:
    give_bucket(parent, tmp_path / "bucket", 3)
    os.unlink(next(parent.glob("commits/fffffffffffffffc-*")))
    found = within("branch", parent, "--at", "3", "--to", "new")
    found.refuses("holds the checkpoints of", f"file://{tmp_path}/bucket-branch")
    found = within("branch", parent, "--at", "3", "--to", "new", "checkpoint.bucket=''")
    assert found.code == 0, found.err
    assert within("checkpoint", "verify", "new").code == 0


def test_a_damaged_end_names_the_newest_intact_checkpoint_and_the_way_out(
    trained: Trained, parent: Path, tmp_path: Path
) -> None:
    damage(parent, 6)
    found = within("train", trained.run_file, f"folder={parent}")
    found.refuses("its last checkpoint is damaged", "checksum", "intact one is of step 3")
    command = shlex.split(found.err.strip().rpartition(": ")[2])
    assert command == ["holdfast", "branch", str(parent), "--at", "3", "--to", f"{parent}-again"]
    assert within(*command[1:]).code == 0

    damage(parent, 3)
    found = within("train", trained.run_file, f"folder={parent}")
    found.refuses("no older one is intact", "--fresh")


def test_a_damaged_end_comes_back_from_the_bucket(
    trained: Trained, parent: Path, tmp_path: Path
) -> None:
    give_bucket(parent, tmp_path / "bucket", 6)
    damage(parent, 6)
    settings = (f"folder={parent}", f"checkpoint.bucket=file://{tmp_path}/bucket")
    found = within("train", trained.run_file, *settings)
    assert found.code == 0, found.err
    assert "brought back from the bucket" in found.err
    assert "this run is finished" in found.err
    assert within("checkpoint", "verify", parent).code == 0


# --- a resume never cuts or pads ------------------------------------------------------------
def test_a_checkpoint_of_other_shapes_or_of_a_later_step_is_refused(parent: Path) -> None:
    config = open_run(parent).config
    refuse_unfit_state(parent, config)
    other = config.model_copy(update={"model": config.model.model_copy(update={"ffn_dim": 32})})
    with pytest.raises(CheckpointError, match=r"F32 \[16, 16\] for .* has F32 \[32, 16\]"):
        refuse_unfit_state(parent, other)
    short = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    with pytest.raises(RunFolderError, match=r"done step 6, and train\.steps 5 would cut it"):
        refuse_unfit_state(parent, short)


def test_a_longer_decay_names_the_checkpoint_before_it(parent: Path) -> None:
    short = TrainConfig(steps=6, schedule=ScheduleConfig(kind="wsd", warmup_steps=1, decay_steps=2))
    long = short.model_copy(update={"steps": 12})
    config = open_run(parent).config
    stored = config.model_copy(update={"train": short}).model_dump(mode="json")
    command, _ = branch_command(parent, stored, config.model_copy(update={"train": long}))
    assert "--at 3 " in command, "the rate of step 5 would change, and of no step before it"
    other = long.model_copy(update={"optimizer": OptimizerConfig(learning_rate=1e-4)})
    command, note = branch_command(parent, stored, config.model_copy(update={"train": other}))
    assert "--at 6 " in command
    assert note == " (the rate 0.0003 becomes 0.0001)"
    cosine = {"steps": 12, "schedule": ScheduleConfig(warmup_steps=1)}
    stored["train"] = short.model_copy(update={**cosine, "steps": 6}).model_dump(mode="json")
    longer = config.model_copy(update={"train": short.model_copy(update=cosine)})
    assert "--at 6 " in branch_command(parent, stored, longer)[0]


def test_the_rate_of_a_longer_run_with_learners_counts_their_inner_steps(parent: Path) -> None:
    linear = ScheduleConfig(kind="linear", warmup_steps=0, final_ratio=0.0)
    short = TrainConfig(steps=6, schedule=linear)
    rounds = {"train": short, "outer": OuterConfig(learners=2, every_steps=10)}
    config = open_run(parent).config.model_copy(update=rounds)
    long = config.model_copy(update={"train": short.model_copy(update={"steps": 18})})
    peak = short.optimizer.learning_rate
    _, note = branch_command(parent, config.model_dump(mode="json"), long)
    # Round 6 ends with the last of 60 inner steps. The next inner step is number 61 of 180.
    assert note == f" (the rate 0 becomes {peak * 119 / 180:.3g})"


def test_another_batch_names_the_branch_that_has_it_from_its_first_step_on(
    parent: Path, trained: Trained
) -> None:
    found = within("train", trained.run_file, f"folder={parent}", "train.batch_size=8")
    found.refuses("train.batch_size was 4 and is now 8")
    command = shlex.split(found.err.strip().rpartition("run of its own: ")[2])
    assert within(*command[1:]).code == 0
    train = load_config(Path(f"{parent}-branch/run.yaml")).config.train
    sizes = [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
    assert (train.batch_size, sizes) == (4, [(4, 8)])


def test_fewer_steps_than_are_done_name_the_least(trained: Trained) -> None:
    found = within("train", trained.run_file, "train.steps=3")
    found.refuses("done step 6, and train.steps 3 would cut it; use train.steps=6 or more")
    assert "is finished" in within("train", trained.run_file, "train.steps=6").err


def test_the_least_steps_make_the_branch_that_a_refusal_names(
    parent: Path, trained: Trained
) -> None:
    os.unlink(next(parent.glob("commits/fffffffffffffff9-*")))
    found = within("train", trained.run_file, f"folder={parent}", "train.steps=3")
    command = shlex.split(found.err.strip().rpartition("): ")[2])
    assert within(*command[1:]).code == 0, found.err
