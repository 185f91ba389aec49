"""Commands on a run that was really trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from holdfast.cli.report import follow_run
from holdfast.config.loading.load import load_config
from holdfast.errors import ConfigError
from holdfast.export.texts import Sampling, continuations
from holdfast.export.weights import choose_checkpoint
from holdfast.launch.node.devices import describe_devices
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo
from tests.runtime.cli.conftest import Trained
from tests.support.commands import apart, within, write_run_file


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Trained:
    """A copy of the run that a test may damage. (Paths in it still lead to the original's
    dataset, which `dataset_of` replaces where a test needs its own.)"""
    shutil.copytree(trained.folder, tmp_path / "run")
    text = trained.run_file.read_text().replace(
        f"folder: {trained.folder}", f"folder: {tmp_path / 'run'}"
    )
    (tmp_path / "run.yaml").write_text(text)
    return Trained(tmp_path, trained.outcome)


def dataset_of(copy: Trained, tmp_path: Path) -> Path:
    """Give a copy of the run a dataset of its own, and return its folder."""
    resolved = copy.folder / "resolved.json"
    value = json.loads(resolved.read_text())
    value["dataset"]["folder"] = str(shutil.copytree(value["dataset"]["folder"], tmp_path / "set"))
    resolved.write_text(json.dumps(value))
    return tmp_path / "set"


def test_training_says_what_it_does_and_that_it_finished(trained: Trained) -> None:
    assert "6/6" in trained.outcome.out
    assert "finished" in trained.outcome.err
    first = next(line for line in trained.outcome.err.splitlines() if "a new run in" in line)
    assert first == f"a new run in {trained.folder.resolve()}"


def test_the_run_folder_describes_itself(trained: Trained) -> None:
    resolved = json.loads((trained.folder / "resolved.json").read_text())
    environment = json.loads((trained.folder / "environment.json").read_text())
    assert (trained.folder / "run.yaml").read_text() == trained.run_file.read_text()
    assert resolved["config"]["train"]["steps"] == 6
    line = trained.run_file.read_text().split("\n").index("  steps: 6") + 1
    assert resolved["origins"]["train.steps"]["place"] == f"{trained.run_file}:{line}"
    assert resolved["origins"]["model.vocab_size"]["kind"] == "planned"
    manifest = json.loads((trained.root / "dataset" / "manifest.json").read_text())
    assert resolved["dataset"]["version"] == manifest["version"]
    assert environment["packages"]["torch"]
    assert environment["hardware"]["cores"] >= 1
    assert "git" in environment


def test_train_again_says_that_it_is_finished(trained: Trained) -> None:
    before = sorted(p.name for p in trained.folder.rglob("*"))
    found = within("train", trained.run_file)
    assert found.code == 0
    assert "this run is finished: all 6 steps are done" in found.err
    assert sorted(p.name for p in trained.folder.rglob("*")) == before


def test_a_report_follows_a_run_to_its_end(trained: Trained, copy: Trained) -> None:
    """Records come while it follows; the last page does not load itself again."""
    (segment,) = (copy.folder / "journal").glob("*/agent.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if b"run_finished" in line)
    segment.write_bytes(b"".join(lines[:end]))
    page, waits = copy.root / "page.html", list[str]()

    def wait(seconds: float) -> None:
        waits.append(page.read_text())
        assert len(waits) < 100
        if len(waits) == 2:
            segment.write_bytes(b"".join(lines))

    follow_run(open_run(copy.folder), page, lambda: False, wait)
    assert len(waits) == 2
    assert all('http-equiv="refresh"' in text for text in waits)
    assert "refresh" not in page.read_text()
    assert "finished" in page.read_text()


def test_a_folder_of_another_configuration_is_refused(trained: Trained) -> None:
    resolved = (trained.folder / "resolved.json").read_bytes()
    found = within("train", trained.run_file, "train.steps=7", "seed=3")
    found.refuses(
        "another configuration", "train.schedule.steps was 6 and is now 7", "seed was 1", "--fresh"
    )
    assert (trained.folder / "resolved.json").read_bytes() == resolved


def test_a_file_in_the_way_is_refused(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "run").write_text("")
    within("train", trained.run_file, f"folder={tmp_path / 'run'}").refuses("is a file")
    within("train", trained.run_file, f"folder={tmp_path / 'run' / 'x'}").refuses("is a file")


def test_a_folder_that_cannot_be_written_is_refused(trained: Trained) -> None:
    within("train", trained.run_file, "folder=/proc/holdfast").refuses("/proc/holdfast")


def test_a_vocabulary_that_is_too_small_is_refused(trained: Trained) -> None:
    found = within("train", trained.run_file, "model.vocab_size=100", "folder=/nowhere/x")
    found.refuses("model.vocab_size 100 is smaller than the dataset's vocabulary of 300")


def test_more_workers_than_accelerators_are_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = within("train", trained.run_file, "device=cuda")
    found.refuses("device is cuda, but this machine has none; use device=cpu")


HOST = HardwareInfo(
    "host",
    "Linux",
    8,
    2**34,
    2**33,
    tuple(Accelerator(index, "NVIDIA H100 80GB HBM3", 80 * 2**30) for index in range(4)),
)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ((), 4),
        (("layout.dp_shard=3", "train.batch_size=6", "train.microbatch_size=3"), 3),
        (("train.batch_size=2",), 2),  # so many have work
        (("device=cpu",), 1),
        (("cluster.node=a", "cluster.places=2"), 1),
    ],
)
def test_a_host_with_several_gpus_is_planned_a_worker_for_each(
    tmp_path: Path, settings: tuple[str, ...], workers: int
) -> None:
    asked = ["device=auto", "layout.workers=0", *settings]
    found = plan_for_machine(load_config(write_run_file(tmp_path), asked), Facts(HOST))
    assert found.config.layout.workers == workers
    if workers > 1:
        (line,) = describe_devices(found)
        assert f"{workers} workers on cuda (for the cuda devices of host, of which it has 4" in line


def test_a_gpu_that_torch_was_not_built_for_is_refused(tmp_path: Path) -> None:
    host = replace(HOST, torch_computes_on="CPU")
    loaded = load_config(write_run_file(tmp_path), ["device=auto", "layout.workers=1"])
    with pytest.raises(ConfigError, match="but torch was built for the CPU alone") as refused:
        plan_for_machine(loaded, Facts(host))
    assert refused.value.remedy == "install a torch that was built for it, or use device=cpu"
    plan_for_machine(load_config(tmp_path / "run.yaml", ["device=cpu"]), Facts(host))


def test_several_workers_get_a_device_each_and_the_person_a_warning(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    asked = load_config(run_file, ["device=cuda", "layout.workers=4"])
    found = plan_for_machine(asked, Facts(HOST))
    assert (found.config.device, found.config.layout.workers) == ("cuda", 4)
    (line,) = describe_devices(found)
    assert line.startswith("4 workers on cuda: ")
    assert "only been run with stand-ins" in line
    with pytest.raises(
        ConfigError, match=r"layout\.workers is 5, but this machine has 4"
    ) as caught:
        plan_for_machine(load_config(run_file, ["device=cuda", "layout.workers=5"]), Facts(HOST))
    assert "command line: layout.workers=5" in str(caught.value.where)
    of_a_node = ["device=cuda", "layout.workers=4", "cluster.node=a", "cluster.places=4"]
    plan_for_machine(load_config(run_file, of_a_node), Facts(HOST))
    with pytest.raises(ConfigError, match=r"cluster\.places is 6, but this machine has 4"):
        plan_for_machine(load_config(run_file, [*of_a_node[:3], "cluster.places=6"]), Facts(HOST))


def test_audit_checkpoints_and_data_are_in_order(trained: Trained) -> None:
    audit = within("data", "audit", trained.folder)
    assert audit.code == 0
    assert "none missing, none twice" in audit.out
    listed = json.loads(within("checkpoint", "list", trained.folder, "--json").out)
    assert [row["step"] for row in listed] == [6, 3]
    assert within("checkpoint", "verify", trained.folder).code == 0
    assert within("data", "verify", trained.run_file).code == 0
    shown = within("data", "inspect", trained.run_file, "--json")
    assert json.loads(shown.out)["vocab_size"] == 300


def test_a_run_is_found_by_its_run_file(trained: Trained) -> None:
    by_file = within("checkpoint", "list", trained.run_file)
    assert by_file.out == within("checkpoint", "list", trained.folder).out


def test_keys_of_the_run_file_may_follow_it(trained: Trained, copy: Trained) -> None:
    other = f"folder={copy.folder}"
    listed = within("checkpoint", "list", trained.run_file, other).succeeds()
    assert listed.out == within("checkpoint", "list", copy.folder).succeeds().out
    assert (
        within("report", trained.run_file, other).succeeds().err.startswith(f"wrote {copy.folder}")
    )
    within("report", trained.run_file, "folder").refuses("'folder' is no key=value of a run file")
    within("report", trained.folder, other).refuses(f"{trained.folder} is none")
    several = within("report", trained.folder, str(copy.folder))
    several.refuses(f"holdfast status {trained.folder} {copy.folder}")


def test_several_runs_have_a_table_with_the_keys_that_differ(copy: Trained) -> None:
    path = copy.folder / "resolved.json"
    value = json.loads(path.read_text())
    twin = Path(shutil.copytree(copy.folder, copy.root / "twin"))
    value["config"]["seed"] = 77
    (twin / "resolved.json").write_text(json.dumps(value))
    found = within("status", copy.folder, twin)
    head, *rows = found.out.splitlines()
    assert found.code == 1, "none is at work"
    assert head.split() == ["run", "state", "step", "loss", "validation", "speed", "seed"]
    assert [row.split()[0] for row in rows] == [str(copy.folder), str(twin)]
    assert all("finished  6 of 6" in row for row in rows)
    assert rows[1].endswith(" 77")
    told = json.loads(within("status", copy.folder, twin, "--json").out)
    assert told[1]["keys"] == {"seed": 77}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for command in (["report"], ["watch"], ["data", "audit"], ["checkpoint", "list"]):
        within(*command, tmp_path).refuses(str(tmp_path), "there is no run here")


def test_report_and_watch_of_a_finished_run(trained: Trained, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert within("report", trained.folder, "--output", page).code == 0
    assert "<html" in page.read_text()
    numbers = json.loads(within("report", trained.folder, "--json").out)
    assert (numbers["state"], numbers["last_step"]) == ("finished", 6)
    watched = within("watch", trained.folder, "--json")
    kinds = [json.loads(line)["kind"] for line in watched.out.splitlines()]
    assert kinds.count("step_done") == 6
    assert "run_finished" in kinds
    assert within("watch", trained.folder).code == 0


def test_the_report_holds_what_the_model_makes_of_a_prompt(
    trained: Trained, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    prompts = ["--sample", "the quick", "--sample", "<over> lazy"]
    assert within("report", trained.folder, "--output", page, *prompts).code == 0
    told = json.loads(within("report", trained.folder, "--json", *prompts).out)["samples"]
    assert [(s["step"], s["prompt"]) for s in told] == [(6, "the quick"), (6, "<over> lazy")]
    content = page.read_text()
    for one in told:
        assert one["text"]
        assert escape(one["prompt"] + one["text"]) in content
    alone = json.loads(within("generate", trained.folder, "the quick", "--json").out)
    assert alone["text"] == told[0]["text"]


def test_a_report_needs_no_dataset(copy: Trained, tmp_path: Path) -> None:
    """Without the counts that only the run's own dataset gives, and it says so."""
    dataset = dataset_of(copy, tmp_path)
    found = within("report", copy.folder, "--json")
    assert set(json.loads(found.out)["baselines_bits_per_byte"]) == {"unigram", "bigram"}
    shard = max(dataset.rglob("*.bin"))
    shard.unlink()
    found = within("report", copy.folder, "--json")
    assert (found.code, json.loads(found.out)["baselines_bits_per_byte"]) == (0, {})
    assert "no counts beside the curve" in found.err
    shutil.rmtree(dataset)
    write_run_file(tmp_path / "other", documents=3)
    other = tmp_path / "other" / "run.yaml"
    assert within("data", "prepare", other, f"data.folder={dataset}").code == 0
    found = within("report", copy.folder)
    assert (found.code, "holds another dataset now" in found.err) == (0, True)


def test_an_audit_against_changed_tokens_proves_nothing(copy: Trained, tmp_path: Path) -> None:
    dataset = dataset_of(copy, tmp_path)
    assert within("data", "audit", copy.folder).code == 0
    shard = max(dataset.rglob("validation*.bin"))  # no step is fed from it
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    found = within("data", "audit", copy.folder)
    assert found.code == 1
    assert f"{shard}: its bytes are not what was written" in found.out


def test_a_journal_with_an_unreadable_line_is_read_and_the_line_is_named(copy: Trained) -> None:
    """The line was a step's; the next start of the run, report and audit continue without it."""
    segment = next(copy.folder.glob("journal/*/rank0.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"batch_fed"' in line)
    lines[place] = b"\x00" * (len(lines[place]) - 1) + b"\n"
    segment.write_bytes(b"".join(lines))
    named = f"{segment.relative_to(copy.folder)}, line {place + 1}"
    report = json.loads(within("report", copy.folder, "--json").out)
    assert any(named in hole for hole in report["holes"])
    audit = within("data", "audit", copy.folder)
    assert (audit.code, named in audit.out, "never fed" in audit.out) == (1, True, True)
    again = within("train", copy.run_file)
    assert again.code == 0
    assert "all 6 steps are done" in again.err + again.out


def test_a_journal_that_is_gone_is_not_an_empty_run(copy: Trained) -> None:
    shutil.rmtree(copy.folder / "journal")
    audit = within("data", "audit", copy.folder)
    assert audit.code == 1
    assert "though there is a checkpoint of step 6" in audit.out
    (hole,) = json.loads(within("report", copy.folder, "--json").out)["holes"]
    assert "though there is a checkpoint of step 6" in hole


def test_text_ends_where_the_model_ends_it(trained: Trained) -> None:
    run = open_run(trained.folder)
    checkpoint = choose_checkpoint(run, None, print)
    texts = [
        continuations(run, checkpoint, ["the"], Sampling(tokens=200, temperature=3.0, seed=seed))[0]
        for seed in range(8)
    ]
    assert not any("<|end|>" in text for text in texts)
    assert min(map(len, texts)) < max(map(len, texts)) / 2


def test_text_is_sampled_repeatably(trained: Trained) -> None:
    arguments = ["generate", trained.folder, "the quick", "--tokens", "8", "--json"]
    first = json.loads(within(*arguments).out)
    assert first["step"] == 6
    assert first["text"]
    assert json.loads(within(*arguments).out) == first
    older = json.loads(within(*arguments, "--step", "3").out)
    assert older["step"] == 3
    within(*arguments, "--chat").refuses("not trained on chat data", "leave out --chat")
    within(*arguments, "--step", "4").refuses("no whole checkpoint of step 4", "there are: 3, 6")
    within(*arguments, "--temperature", "nan").refuses("cannot be sampled from")


def test_a_checkpoint_that_is_asked_for_is_found_behind_a_damaged_one(copy: Trained) -> None:
    newest = min((copy.folder / "commits").iterdir())
    newest.write_text("{")
    arguments = ["generate", copy.folder, "the", "--tokens", "1", "--json"]
    for more in ([], ["--step", "3"]):
        found = within(*arguments, *more)
        assert found.code == 0, found.err
        assert json.loads(found.out)["step"] == 3
        assert newest.name in found.err
    within(*arguments, "--step", "6").refuses_last("no whole checkpoint of step 6")


def test_an_exported_folder_imports_as_the_start_of_a_run(trained: Trained, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert within("export", trained.folder, "--to", model).code == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in model.iterdir()
    }
    within("export", trained.folder, "--to", model).refuses(str(model), "empty")
    for name in ("config.json", "generation_config.json"):
        told = json.loads((model / name).read_text())
        assert told["eos_token_id"] == 0, f"{name}: what ends a document must end generation"
    assert json.loads((model / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    run = tmp_path / "run"
    options = [trained.run_file, "--from", model, f"folder={run}"]
    imported = within("checkpoint", "import", *options, "--json")
    assert imported.code == 0, imported.err
    assert json.loads(imported.out)["step"] == 0
    again = tmp_path / "again"
    assert within("export", run, "--to", again).code == 0
    name = "model.safetensors"
    assert (again / name).read_bytes() == (model / name).read_bytes()
    within("checkpoint", "import", *options).refuses("has checkpoints already")


def test_a_folder_in_bf16_comes_back_byte_for_byte(trained: Trained, tmp_path: Path) -> None:
    """As public models are: imported into float32, exported in the dtype that it had."""
    model, run, again = tmp_path / "model", tmp_path / "run", tmp_path / "again"
    half = ["--dtype", "bfloat16"]
    assert within("export", trained.folder, "--to", model, *half).code == 0
    assert json.loads((model / "config.json").read_text())["dtype"] == "bfloat16"
    imported = within("checkpoint", "import", trained.run_file, "--from", model, f"folder={run}")
    assert imported.code == 0, imported.err
    assert within("export", run, "--to", again, *half).code == 0
    for path in model.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    within("export", run, "--to", tmp_path / "x", "--dtype", "int3").refuses("--dtype")


def test_a_damaged_checkpoint_is_found_and_passed_over(copy: Trained) -> None:
    blob = max((copy.folder / "data").rglob("*.safetensors"))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    found = within("checkpoint", "verify", copy.folder)
    assert found.code == 1
    assert "checksum does not match" in found.out
    sampled = within("generate", copy.folder, "the", "--tokens", "1", "--json")
    assert json.loads(sampled.out)["step"] == 3
    assert "skipped commits/" in sampled.err


def test_a_changed_byte_of_the_dataset_is_found(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    assert within("data", "prepare", run_file).code == 0
    shard = max((tmp_path / "dataset").rglob("*.bin"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    found = within("data", "verify", run_file)
    assert found.code == 1
    assert str(shard) in found.out
    within("train", run_file).refuses(str(shard), "not what was written")
    assert not (tmp_path / "run").exists()


def test_data_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    for command in ("inspect", "verify"):
        within("data", command, run_file).refuses("no prepared dataset", "data prepare")


# --- `layout.trace_step` and `holdfast report --trace` --------------------------------------------
@pytest.mark.slow
def test_a_step_of_a_run_is_written_for_a_viewer(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    settings = ("model.layers=2", "layout.pp=2", "train.steps=4", "layout.workers=4")
    trained = apart("train", run_file, *settings, "layout.trace_step=3", deadline=240)
    assert trained.code == 0, trained.err
    path = tmp_path / "trace.json"
    written = apart("report", tmp_path / "run", "--trace", path)
    assert written.code == 0, written.err
    assert "step 3, 4 workers" in written.err
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(4):
        names = {(e["cat"], e["name"]) for e in events if e["pid"] == rank}
        stage = rank % 2
        assert {("compute", f"{stage}F0"), ("compute", f"{stage}B1")} <= names
        assert ("reduce", "bucket 0") in names
    folder, missing = tmp_path / "run", tmp_path / "none" / "trace.json"
    within("report", folder, "--trace", tmp_path).refuses(
        f"{tmp_path}: the trace cannot be written: this is a folder"
    )
    within("report", folder, "--trace", missing).refuses(
        f"{missing}: the trace cannot be written (No such file or directory)"
    )
    assert not missing.parent.exists()


@pytest.mark.parametrize("options", [["--json"], ["--output", "a.html"], ["--sample", "a"]])
def test_a_trace_is_written_alone(options: list[str], tmp_path: Path) -> None:
    found = within("report", tmp_path, "--trace", tmp_path / "trace.json", *options)
    found.refuses(f"{options[0]} has no effect with --trace; leave one of the two out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_without_a_traced_step_says_how_to_get_one(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    assert apart("train", run_file, "train.steps=2", "layout.workers=1", deadline=240).code == 0
    asked = apart("report", tmp_path / "run", "--trace", tmp_path / "trace.json")
    asked.refuses("no step of this run was traced", "layout.trace_step")
    assert not (tmp_path / "trace.json").exists()
