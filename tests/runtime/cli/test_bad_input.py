"""Each mistake that a person can make, through the command line: exit code 2, one sentence, and
every byte on the disk is what it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import join as join_module
from holdfast.errors import LayoutError
from holdfast.launch.node.node_name import default_node_name
from holdfast.layout import Replica, Topology
from tests.runtime.cli.conftest import Trained
from tests.support.commands import Outcome, apart, within, write_run_file
from tests.support.marks import in_campaign


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


# --- the run file -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps: 6", "stpes: 6", ["run.yaml:14: unknown key train.stpes", "mean train.steps?"]),
        ("name: tiny", "name: ../up", ["run.yaml:1: name is '../up'"]),
        ("name: tiny", "name: ..", ["run.yaml:1: name is '..'"]),
        ("name: tiny", "name: caf\\xe9", ["run.yaml:1: the byte 0xe9 is not UTF-8"]),
    ],
)
def test_run_file(old: str, new: str, words: list[str], tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    text = run_file.read_text()
    assert old in text
    run_file.write_bytes(text.replace(old, new).encode().replace(b"\\xe9", b"\xe9"))
    before = tree(tmp_path)
    within("train", run_file).refuses(*words)
    assert tree(tmp_path) == before


def test_compiling_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = write_run_file(tmp_path)
    before = tree(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    within("train", run_file, "train.compile=true").refuses(
        "command line: train.compile=true: train.compile needs a C++ compiler", "install g++"
    )
    assert tree(tmp_path) == before


# --- sources ----------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [["train"], ["data", "prepare"]])
def test_a_source_that_is_no_text(command: list[str], tmp_path: Path) -> None:
    """Each other mistake with a source: `tests/runtime/data/test_bad_input.py`."""
    run_file = write_run_file(tmp_path)
    (tmp_path / "texts" / "3.txt").write_bytes("café".encode("latin-1"))
    within(*command, run_file).refuses_last("3.txt", "byte 0xe9 at offset 3 is not UTF-8")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_a_huggingface_source_without_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    run_file = write_run_file(tmp_path)
    within("train", run_file, "data.sources.0.kind=huggingface", "data.sources.0.path=a/b").refuses(
        "needs the datasets package", "pip install 'holdfast[hf]'"
    )


# --- what is there already --------------------------------------------------------------------
def other_tokenizer(trained: Trained, folder: Path) -> Path:
    """The run's tokenizer with two tokens exchanged."""
    table = json.loads((trained.root / "dataset" / "tokenizer.json").read_text())
    vocab = table["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(table))
    return path


def test_weights_of_another_tokenizer_are_not_imported(trained: Trained, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert within("export", trained.folder, "--to", model).code == 0
    other_tokenizer(trained, model)
    within(
        "checkpoint", "import", trained.run_file, "--from", model, f"folder={tmp_path}/run"
    ).refuses("tokenised with another tokenizer: 2 tokens have another id", "data.tokenizer.path=")
    assert not (tmp_path / "run").exists()


def test_weights_of_another_shape_leave_no_run_behind(trained: Trained, tmp_path: Path) -> None:
    """The remedy changes the configuration, so no run folder of the first may stand in its way."""
    model, run = tmp_path / "model", tmp_path / "run"
    assert within("export", trained.folder, "--to", model).code == 0
    command = ["checkpoint", "import", trained.run_file, f"folder={run}"]
    within(*command, "--from", tmp_path).refuses("there is no config.json here")
    assert not run.exists()
    within(*command, "--from", model, "model.layers=2").refuses("use model.layers=1")
    assert not run.exists()
    assert within(*command, "--from", model, "model.layers=1").code == 0


def test_a_prompt_and_a_page_that_cannot_be(trained: Trained) -> None:
    within("generate", trained.folder, "caf\udce9").refuses("the prompt is not UTF-8 text")
    within("report", trained.folder, "--output", ".").refuses(".: the report", "is a folder")


@pytest.mark.parametrize("seconds", ["nan", "0", "-3", "1e9"])
def test_a_notice_of_no_time(seconds: str, trained: Trained) -> None:
    words = [f"a notice of {float(seconds):g} seconds makes no sense", "--seconds"]
    within("notice", trained.folder, "--seconds", seconds).refuses(*words)


def test_a_run_folder_that_was_trained_on_another_dataset(trained: Trained, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    shutil.copytree(trained.root / "texts", texts)
    (texts / "more.txt").write_text("another text\n")
    before = tree(trained.root)
    changed = json.loads((trained.folder / "resolved.json").read_text())
    copy = shutil.copytree(trained.folder, tmp_path / "run")
    changed["config"]["data"]["sources"][0]["path"] = str(texts)
    (copy / "resolved.json").write_text(json.dumps(changed))
    inside = tree(copy)
    within(
        "train",
        trained.run_file,
        f"data.sources.0.path={texts}",
        f"folder={copy}",
        f"data.folder={tmp_path}/set",
    ).refuses_last("the run was trained on dataset", "--fresh")
    assert tree(copy) == inside
    assert tree(trained.root) == before


def test_starting_over_leaves_other_peoples_folders_where_they_are(
    trained: Trained, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("\\end")
    before = tree(tmp_path)
    for fresh in ((), ("--fresh",)):
        found = within("train", trained.run_file, f"folder={tmp_path}/home", *fresh)
        found.refuses(f"{tmp_path}/home", "not a run folder", "thesis.tex")
    within("train", trained.run_file, "folder=.", "--fresh").refuses("not a run folder")
    assert tree(tmp_path) == before


def test_a_start_that_was_cut_short_does_not_bar_the_next(trained: Trained, tmp_path: Path) -> None:
    """A full disk, or a kill, between the first file of a run folder and `resolved.json`."""
    from holdfast.launch.run.run_folder import refuse_foreign

    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.yaml", "environment.json", ".tmp-resolved.json-123"):
        (run / name).write_text("half")
    before = tree(run)
    refuse_foreign(run)  # raises where it does
    assert tree(run) == before


@pytest.mark.slow
def test_a_node_that_begins_beside_another_finds_a_run_folder(
    trained: Trained, tmp_path: Path
) -> None:
    """Whenever it looks: before, while or after the other writes what makes it one."""
    from holdfast.config.loading.load import load_config
    from holdfast.launch.run.run_folder import refuse_other

    stored = (trained.folder / "resolved.json").read_bytes()
    loaded, version = load_config(trained.run_file), json.loads(stored)["dataset"]["version"]

    def begin(run: Path) -> None:
        (run / ".tmp-resolved.json").write_bytes(stored)
        (run / ".tmp-resolved.json").rename(run / "resolved.json")
        (run / "secret").write_text("x")

    for number in range(300):
        run = tmp_path / str(number)
        run.mkdir()
        other = threading.Thread(target=begin, args=(run,))
        other.start()
        while other.is_alive():
            refuse_other(run, loaded, version)  # raises where it does
        assert (run / "secret").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"config": {"train": {"steps": "many"}}}',
        '{"config": {}, "dataset": "x"}',
        "[]",
        "\\xff",
        "[" * 100_000,
    ],
)
def test_a_run_folder_whose_description_was_edited(text: str, tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_bytes(text.encode().replace(b"\\xff", b"\xff"))
    for command in (["report"], ["watch"], ["data", "audit"], ["checkpoint", "verify"]):
        within(*command, tmp_path).refuses("resolved.json", "not what 'holdfast train' wrote")


def test_a_run_folder_whose_description_is_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").symlink_to("resolved.json")
    for command in (
        ["checkpoint", "list"],
        ["checkpoint", "verify"],
        ["checkpoint", "show"],
        ["export", "--to", tmp_path / "out"],
    ):
        within(*command, tmp_path).refuses("resolved.json: this cannot be read (Too many")


# --- the machine ------------------------------------------------------------------------------
def confined(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A shell script where mounts are its own and root has no power over files."""
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, "sh", sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def namespaces_work() -> bool:
    return shutil.which("unshare") is not None and confined("mount -t tmpfs x /mnt").returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="no namespaces here")


@pytest.mark.slow
@needs_namespaces
def test_a_full_disk_for_the_run_folder_then_room(trained: Trained, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = confined(
        'mount -t tmpfs -o size=12k x "$3"; '
        '"$1" -m holdfast.cli.main train "$2" folder="$3/run" layout.workers=1; echo "code $?"; '
        'ls -A "$3/run"; mount -o remount,size=16m "$3"; '
        '"$1" -m holdfast.cli.main train "$2" folder="$3/run" layout.workers=1 >&2; '
        'echo "code $?"',
        trained.run_file,
        disk,
    )
    first, *left, last = done.stdout.splitlines()
    assert (first, last) == ("code 2", "code 0"), done.stderr
    assert [name for name in left if name.startswith(".tmp-")] == []
    assert "the disk is full" in done.stderr
    assert "finished; the report:" in done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no namespaces here")
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{run_file}", "folder={place}/run"],
        ["data", "prepare", "{run_file}", "data.folder={place}/set"],
        in_campaign(["report", "{run}", "--output", "{place}/page.html"], id="report"),
        in_campaign(["export", "{run}", "--to", "{place}/model"], id="export"),
        ["init", "{place}/new.yaml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_write_permission(arguments: list[str], trained: Trained, tmp_path: Path) -> None:
    """In a user namespace without a map, even root is only the owner of its files."""
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    words = {"run_file": trained.run_file, "run": trained.folder, "place": place}
    command = [word.format(**words) for word in arguments]
    done = subprocess.run(
        ["unshare", "-U", sys.executable, "-m", "holdfast.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    Outcome(done.returncode, done.stdout, done.stderr).refuses(str(place), "ermission")
    assert list(place.iterdir()) == []


def test_a_secret_in_a_buckets_address_is_written_nowhere(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    address = "s3://b/x?endpoint=https://me:hunter2@host"
    done = apart("train", trained.run_file, f"folder={folder}", f"checkpoint.bucket={address}")
    done.refuses("the endpoint holds more than an address")
    assert "hunter2" not in done.out + done.err
    assert not folder.exists()


# --- paths on the command line of every command ---------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "$SCRATCH/run"),
        ("export", "run", "--to", "$SCRATCH/hf"),
        ("checkpoint", "list", "$SCRATCH/run"),
        ("checkpoint", "diff", "$SCRATCH/a", "b"),
        ("checkpoint", "import", "run.yaml", "--from", "$SCRATCH/hf"),
        ("init", "$SCRATCH/run.yaml"),
        ("data", "verify", "$SCRATCH/run.yaml"),
        ("config", "show", "folder=$SCRATCH/run"),
    ],
)
def test_a_variable_is_refused(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH", raising=False)
    outcome = within(*arguments)
    outcome.refuses("has a $", "command line")
    assert list(tmp_path.iterdir()) == []


def test_the_home_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option as --to=~/x reaches a program with its ~."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert within("init", "~/run.yaml").code == 0
    assert (tmp_path / "home" / "run.yaml").exists()
    within("report", "~/nothing").refuses(f"{tmp_path}/home/nothing")
    within("export", "~/nothing", "--to=~/x").refuses(f"{tmp_path}/home/nothing")
    assert list((tmp_path / "here").iterdir()) == []


# --- what `join` checks on its own machine --------------------------------------------------------
@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("", "device", "cuda", ("device is cuda, but this machine has none; use device=cpu",)),
        ("train", "compile", True, ("train.compile needs a C++ compiler",)),
        ("logging", "trackers", ["wandb"], ("wandb",)),
    ],
)
def test_a_node_refuses_what_its_machine_cannot_do(
    section: str,
    key: str,
    value: Any,
    words: tuple[str, ...],
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    path = tmp_path / "run/resolved.json"
    stored = json.loads(path.read_text())
    (stored["config"][section] if section else stored["config"])[key] = value
    path.write_text(json.dumps(stored))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(join_module, "finished_step", lambda *_: None)
    within("join", tmp_path / "run", "--node", "b").refuses(*words)


def test_the_name_of_a_node_comes_from_its_owner() -> None:
    pod = {"POD_NAME": "tiny-0"}
    assert default_node_name(pod | {"SLURMD_NODENAME": "n3"}) == "n3"
    assert default_node_name(pod) == "tiny-0"
    assert default_node_name({}) != ""
    assert default_node_name({"POD_NAME": "x" * 80 + "-7"}).endswith("x-7")
    assert len(default_node_name({"POD_NAME": "x" * 80 + "-7"})) <= 63


# --- every layout that cannot work is refused before anything starts ------------------------------
# 4 blocks, 12 heads, 4 key/value heads; 6 microbatches of 4 samples a step.
SHAPE = (
    "model.layers=4",
    "model.dim=24",
    "model.heads=12",
    "model.kv_heads=4",
    "model.ffn_dim=24",
    "train.batch_size=24",
    "train.microbatch_size=4",
    "layout.workers=0",
)


@pytest.mark.parametrize("command", [("train",), ("layout", "show")])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.tp=5"], ["layout.tp 5 does not divide model.heads 12", "use 4"]),
        (
            ["layout.workers=7"],
            ["layout.workers 7 make 7 replicas, but step 1 has 6 microbatches", "use 6 workers"],
        ),
        (
            ["layout.workers=4", "train.batch_warmup=[{from_step: 2, batch_size: 4}]"],
            ["step 2 has 1 microbatch of", "use 1 worker or fewer"],
        ),
        (
            ["layout.pp=4", "layout.workers=8"],
            [
                "layout.pp 4 under 1f1b needs 4 microbatches a replica",
                "replica 0 gets 3",
                "layout.schedule=gpipe",
                "layout.workers 4",
            ],
        ),
        (
            ["layout.replicas=[{pp: 4}, {pp: 2}]", "train.batch_size=20"],
            ["layout.replicas.0.pp 4 under 1f1b needs 4", "layout.replicas.0.pp 2"],
        ),
    ],
)
def test_refused_before_anything_starts(
    overrides: list[str], words: list[str], command: tuple[str, ...], tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path)
    before = tree(tmp_path)
    within(*command, run_file, *SHAPE, *overrides).refuses(*words)
    assert tree(tmp_path) == before


def test_the_line_of_the_run_file_is_named(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    text = run_file.read_text().replace("{workers: 2}", "{workers: 9}")
    run_file.write_text(text)
    line = text.split("\n").index("layout: {workers: 9}") + 1
    within("train", run_file).refuses(
        f"run.yaml:{line}: layout.workers 9 make 9 replicas, but step 1 has 4 microbatches",
        "use 4 workers or fewer",
    )


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        ([(0, 1), (1, 2)], "topology: rank 1 stands twice, in replica 0 and in replica 1; "),
        ([(0, 0)], "topology: rank 0 stands twice, in replica 0; "),
        ([(0, 2)], "topology: ranks [1] are missing; "),
    ],
)
def test_a_topology_with_a_rank_twice_or_missing(
    replicas: list[tuple[int, ...]], sentence: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        Topology(
            1,
            tuple(Replica(i, ranks, (1, 2, 1, 1)) for i, ranks in enumerate(replicas)),
            ("here",) * sum(map(len, replicas)),
        )
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
