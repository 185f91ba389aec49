"""Remedies of messages about command lines and the files that they name."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from re import Match

import pytest
from torch import nn

from holdfast.api.start import SCREEN
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.cli import join
from holdfast.cli.read_errors import explain_read_errors
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.timing import Durations, time_schedule
from holdfast.data.stream.dataset import Dataset
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.kubernetes import _parse_taints
from holdfast.elastic.notices.ray import make_ray_source
from holdfast.launch.node.node_place import PLACE_VARIABLE, by_place
from holdfast.launch.start.data import with_vocabulary
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.catalogue import CATALOGUE_FILE, COLUMNS, load_catalogue
from holdfast.report.trackers.registry import check_options, load_tracker, require_tracker
from holdfast.show.layout_distance import distance
from holdfast.tasks.task.loading import load_task
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.commands import chaos
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, setting
from tests.runtime.cli.remedies.of_others import calling, values
from tests.runtime.cli.remedies.of_runs import (
    RUN,
    add,
    attempt,
    begin_run,
    change_file,
    leave_out,
    line,
    replace,
    run_command,
)
from tests.support.sample_tasks import Classifier

ROW = "lab,here,box,RTX,2,100,1.5,0.5,0.1,2026-01-01\n"
SPEC = "cloud spec {root}/run.yaml folder=s3://bucket/run"


def catalogue(lab: Lab, row: str) -> Path:
    return lab.write("mine.csv", ",".join(COLUMNS) + "\n" + row)


def word(old: str, new: str = "{0}") -> Callable[[Lab, Match[str]], None]:
    return replace(old, new)


def last(new: str) -> Callable[[Lab, Match[str]], None]:
    """Write another last word on the line."""

    def mend(lab: Lab, found: Match[str]) -> None:
        lab.settings["line"][-1] = new.format(*found.groups(), root=lab.folder)

    return mend


def one(site: str, command: str, remedy: str, mend: Callable[[Lab, Match[str]], object]) -> Case:
    return case(site, line(command), attempt, remedy, mend)


def schedule(site: str, options: str, remedy: str, mend: Callable[..., object]) -> Case:
    return one(f"cli/layout.py: {site}", f"layout schedule {options}", remedy, mend)


def show(site: str, options: str, remedy: str, mend: Callable[..., object]) -> Case:
    command = f"layout show {{root}}/run.yaml {options}"
    return one(f"cli/layout_show.py: {site}", command, remedy, mend)


def campaign(site: str, call: Callable[[Lab], object], remedy: str, good: str) -> Case:
    return case(
        f"holdfast_lab/commands/chaos.py: {site}", begin_run, call, remedy, fixed(given=good)
    )


def given(lab: Lab, default: str) -> str:
    return str(lab.settings.get("given", default))


# --- checkpoints that are read --------------------------------------------------------------
def flip(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 0xFF]) + content[-99:]


def read_tensor(lab: Lab) -> None:
    store = FolderStore(lab.folder / RUN)
    keys = sorted((lab.folder / RUN / "commits").iterdir())
    checkpoint = Checkpoint.open(store, f"commits/{keys[0].name}")
    with explain_read_errors(lab.folder / RUN):
        checkpoint.spec(lab.settings["tensor"])


def see_intact(lab: Lab, found: Match[str]) -> None:
    """Type the command; it says that step 3 is intact, which is then compared with itself."""
    words = shlex.split(found[1])[1:]
    try:
        run_command(words)
    except AssertionError:  # its exit code is 1: a checkpoint is damaged
        lab.settings["line"] = ["checkpoint", "diff", *[lab.path(f"{RUN}@3")] * 2]


def vocabulary(lab: Lab) -> None:
    overrides = [f"model.vocab_size={lab.settings['size']}"]
    loaded = load_config(lab.folder / "run.yaml", overrides)
    with_vocabulary(loaded, Dataset.open(loaded.config.data.folder), SCREEN)


def no_tokenizer(lab: Lab) -> None:
    run_command(["export", lab.path(RUN), "--to", lab.path("hf")])
    shutil.move(lab.folder / "hf/tokenizer.json", lab.folder)


# --- runs on several machines, notices ------------------------------------------------------
def own(lab: Lab) -> None:
    join._own(lab.settings["overrides"])


def ray(lab: Lab) -> None:
    """Look for the package as it is after the remedy was carried out."""
    known = ModuleSpec("ray", None) if lab.settings.get("installed") else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: known)
        make_ray_source(lab.settings["address"], 1.0, {}, lambda: 0.0)


def auto_notices(lab: Lab) -> None:
    cluster = RunConfig.model_validate({"cluster": lab.settings}).cluster
    make_notice_source(cluster, environment={"SLURM_JOB_ID": "7"}, root=lab.folder)


def require(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(lab.path(lab.settings.get("path", "none")))
        require_tracker(lab.settings["name"])


class Needs(Classifier):
    def __init__(self, width: int) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Linear(self.width, 5)


def begin_quiet_trace(lab: Lab) -> None:
    lab.write("a.jsonl", "0,add,a\n5,add,b\n")
    lab.settings["name"] = "a.jsonl"


def tracker_folder(lab: Lab) -> None:
    lab.write("mine/remedy_tracker.py", "class Own:\n    pass\n")


CASES: list[Case] = [
    case(
        "plan/catalogue.py: the catalogue cannot be read (…)",
        lambda lab: lab.settings.update(file=lab.path("none.csv")),
        lambda lab: load_catalogue(Path(lab.settings["file"])),
        r"name a CSV file, or leave --catalogue out",
        lambda lab, found: lab.settings.update(file=CATALOGUE_FILE),
    ),
    case(
        "plan/catalogue.py: this is not a catalogue",
        lambda lab: lab.settings.update(file=lab.write("mine.csv", "a,b\n")),
        lambda lab: load_catalogue(Path(lab.settings["file"])),
        r"give it the head (.*)",
        lambda lab, found: lab.write("mine.csv", f"{found[1]}\n{ROW}"),
    ),
    case(
        "plan/catalogue.py: a value of this row cannot be read (…)",
        lambda lab: lab.settings.update(file=catalogue(lab, ROW.replace("2026-01-01", "soon"))),
        lambda lab: load_catalogue(Path(lab.settings["file"])),
        r"write numbers, and the date as 2026-07-22",
        lambda lab, found: catalogue(lab, ROW),
    ),
    case(
        "plan/catalogue.py: a number of this row is not possible",
        lambda lab: lab.settings.update(file=catalogue(lab, ROW.replace("0.1,", "1.0,"))),
        lambda lab: load_catalogue(Path(lab.settings["file"])),
        r"count, tflops and prices are above 0, reclaimed_per_month is from 0 to below 1",
        lambda lab, found: catalogue(lab, ROW),
    ),
    one(
        "holdfast_platform/commands/cloud.py: no such machine is in the catalogue",
        "cloud offers --accelerator TPU",
        r"use one of .*?(H100).*; clouds: aws, gcp",
        last("{0}"),
    ),
    one(
        "holdfast_platform/commands/cloud.py: the work is not finite",
        "cloud mix --nodes 2 --work inf",
        r"use a number of (hours)",
        last("5"),
    ),
    one(
        "holdfast_platform/commands/cloud.py: … nodes are more than the … of --nodes",
        "cloud mix --work 5 --nodes 2 --least 3",
        r"use (2) or less",
        last("{0}"),
    ),
    one(
        "holdfast_platform/commands/cloud.py: … is no service that is known",
        SPEC + " --image I --secret S --machine M --for heroku",
        r"use one of .*(vertex).*",
        last("{0}"),
    ),
    one(
        "holdfast_platform/commands/cloud.py: … needs …",
        SPEC + " --for vertex --secret S --machine M",
        r"add (--image) VALUE",
        add("{0} I"),
    ),
    one(
        "holdfast_platform/commands/cloud.py: machines of a service cannot reach a folder of "
        "this machine",
        "cloud spec {root}/run.yaml --image I --for skypilot",
        r"use a bucket, such as folder=(s3://BUCKET/RUN)",
        add("folder={0}"),
    ),
    case(
        "launch/node/node_place.py: … names no place",
        lambda lab: lab.settings.update(place="rck=7"),
        lambda lab: by_place(
            load_config(None, []),
            Facts(detect_hardware(), {PLACE_VARIABLE: lab.settings["place"]}),
        ),
        r"write KIND=NAME with one of node, rack, power, pool, zone",
        fixed(place="rack=7"),
    ),
    case(
        "show/layout_distance.py: a message has at least 1 byte",
        lambda lab: lab.settings.update(size=0),
        lambda lab: distance(size=[lab.settings["size"]]),
        r"use 1 or more",
        fixed(size=1),
    ),
    schedule(
        "… stages are not … on each rank",
        "--stages 3 --virtual 2 --schedule gpipe",
        r"use --stages (\d+)",
        word("3"),
    ),
    schedule(
        "the schedule … has … stages on each rank, not 1",
        "--schedule zbv --virtual 1",
        r"use --virtual (\d)",
        last("{0}"),
    ),
    schedule(
        "there are … times for … stages",
        "--stages 4 --forward 1,1",
        r"give one, or (\d+)",
        word("1,1", "1,1,1,1"),
    ),
    schedule(
        "… is not a time, nor a list of times",
        "--stages 4 --forward x",
        r"write (1), or one for each stage as 1,1,2",
        word("x"),
    ),
    schedule(
        "… is no time that can be drawn",
        "--stages 4 --send -1",
        r"use (\d), or .*",
        word("-1"),
    ),
    schedule(
        "the table cannot be read (…)",
        "--from-csv none.csv",
        r"name a CSV file with a row for each rank",
        lambda lab, found: (lab.write("none.csv", "0F0,0B0\n"), None)[1],
    ),
    schedule(
        "… has no effect with …",
        "{root}/run.yaml --stages 2",
        r"leave one of the two out",
        leave_out("--stages", "2"),
    ),
    schedule(
        "there is no replica …",
        "{root}/run.yaml --replica 9 layout.pp=1",
        r"use (\d) to \d",
        word("9"),
    ),
    show(
        "this is not a loss",
        "--what-if foo",
        r"write (lost=)3, lost=3,5 or lost=node:a",
        last("lost=1"),
    ),
    show(
        "there is no node …",
        "--nodes a,b --what-if lost=node:x",
        r"use one of (\w+).*",
        last("lost=node:{0}"),
    ),
    one(
        "plan/placing/loss_impact.py: rank … is not in a world of …",
        "layout show {root}/run.yaml --what-if lost=99",
        r"use ranks 0 to (\d+)",
        last("lost={0}"),
    ),
    show(
        "… is not a list of different names",
        "--nodes a,a",
        r"write for example --nodes (\S+)",
        last("{0}"),
    ),
    show("… nodes are more than … ranks", "--nodes a,b,c", r"name (2) or fewer", last("a,b")),
    show(
        "… of … cannot hold …",
        "--workers 4 --nodes a,b --ranks-per-node 1",
        r"use (\d+), or name \d+ nodes",
        last("{0}"),
    ),
    show(
        "…, … on a node, leave … without one",
        "--workers 2 --ranks-per-node 2 --nodes a,b",
        r"name (1) node, or leave out --ranks-per-node",
        last("a"),
    ),
    case(
        "cli/read_errors.py: (explain_read_errors)",
        line(
            "checkpoint diff {root}/run@6 {root}/run@3",
            change_file("data/*/0000000006-rank00000-*", flip),
        ),
        attempt,
        r"see which checkpoints are intact: (holdfast checkpoint verify .*)",
        see_intact,
    ),
    case(
        "launch/start/data.py: model.vocab_size … is smaller than the dataset's vocabulary of …",
        lambda lab: (begin_run(lab), lab.settings.update(size=10)),
        vocabulary,
        r"use (\d+), or 0 for the dataset's",
        setting("size", int),
    ),
    case(
        "cli/checkpoint_import.py: there is no tokenizer.json here, so nothing shows that the "
        "dataset's tokens are those that the weights have learnt",
        line("checkpoint import {root}/run.yaml --from {root}/hf folder={root}/new", no_tokenizer),
        attempt,
        r"put it there, or say that they are with (--tokenizer-unchecked)",
        add(),
    ),
    case(
        "cli/checkpoint_import.py: there is no tokenizer.json here, so nothing shows that the "
        "dataset's tokens are those that the weights have learnt",
        line("checkpoint import {root}/run.yaml --from {root}/hf folder={root}/new", no_tokenizer),
        attempt,
        r"put it there, or say that they are with --tokenizer-unchecked",
        lambda lab, found: shutil.move(lab.folder / "tokenizer.json", lab.folder / "hf"),
    ),
    one(
        "export/weights.py: the prompt is not UTF-8 text",
        "generate {root}/run \udcff --tokens 1",
        r"give it in the terminal's encoding, UTF-8",
        word("\udcff", "the"),
    ),
    case(
        "checkpoint/restore/reader.py: there is no tensor …",
        lambda lab: (begin_run(lab), lab.settings.update(tensor="model.none")),
        read_tensor,
        r"restore with the model of the run that wrote it",
        fixed(tensor="model.norm.weight"),
    ),
    case(
        "cli/join.py: … belongs to the run, and cannot differ for one node",
        values(overrides=["train.steps=9"]),
        own,
        r"give (cluster\.)\* or device here, and the rest to holdfast train",
        lambda lab, found: lab.settings.update(overrides=[f"{found[1]}places=1"]),
    ),
    case(
        "elastic/notices/kubernetes.py: … is no taint",
        values(text="=60"),
        calling(_parse_taints),
        r"write KEY or KEY=SECONDS, as (\S+)",
        setting("text"),
    ),
    case(
        (
            "elastic/notices/ray.py: the address of Ray's head is not known",
            "elastic/notices/ray.py: ray is not installed",
        ),
        values(address=""),
        ray,
        r"give HOST:PORT, as `ray start --head` prints it, or set RAY_ADDRESS",
        fixed(address="10.0.0.1:6379"),
        (r"pip install 'holdfast\[ray\]'", fixed(installed=True)),
    ),
    case(
        "elastic/notices/clouds.py: with auto nobody knows whose address this is",
        values(notices="auto", notices_at="http://10.0.0.1"),
        auto_notices,
        r"name the source in cluster.notices, or leave the address away",
        fixed(notices_at=""),
    ),
    campaign(
        "this says neither how many faults nor which",
        lambda lab: chaos._parse_faults(given(lab, "")),
        r"use a number, or some of those of --list",
        "3",
    ),
    campaign(
        "there is no such run file",
        lambda lab: chaos._check_exists(lab.folder / given(lab, "none.yaml")),
        r"name one before any key=value",
        "run.yaml",
    ),
    campaign(
        "… is no part of anything",
        lambda lab: chaos._parse_part(given(lab, "x")),
        r"use 1/2, 2/2",
        "1/2",
    ),
    campaign(
        "a campaign needs several nodes",
        lambda lab: chaos._shapes("tp=2,workers=4", int(given(lab, "1"))),
        r"use 2 or more, or one of .*",
        "2",
    ),
    case(
        "show/output.py: this is a file, and must be a folder",
        begin_run,
        lambda lab: chaos._prepare(lab.folder / given(lab, "run.yaml"), False),
        r"give --out another path",
        fixed(given="out"),
    ),
    case(
        "holdfast_lab/commands/chaos.py: this cannot be read (…)",
        values(name="none.jsonl"),
        lambda lab: chaos._read_draws(lab.folder / lab.settings["name"], 1, 2),
        r"name a file of faults",
        lambda lab, found: lab.write("none.jsonl", '{"step": 3, "fault": "kill"}\n'),
    ),
    case(
        "holdfast_lab/commands/chaos.py: nothing happens in this trace",
        begin_quiet_trace,
        lambda lab: chaos._read_draws(lab.folder / lab.settings["name"], 1, 2),
        r"use another one",
        lambda lab, found: lab.write("a.jsonl", '{"step": 3, "fault": "kill"}\n'),
    ),
    case(
        "core/schedule/timing.py: … takes …",
        values(forward=(-1.0,), backward=(2.0,)),
        lambda lab: Durations(**lab.settings),
        r"use finite numbers of at least (0)",
        lambda lab, found: lab.settings.update(forward=(float(found[1]),)),
    ),
    case(
        "core/schedule/timing.py: … has the times of … stages, the schedule has …",
        values(forward=(1.0, 1.0, 1.0), backward=(2.0, 2.0)),
        lambda lab: time_schedule(build_schedule("gpipe", 2, 2), Durations(**lab.settings)),
        r"give (\d+)",
        lambda lab, found: lab.settings.update(forward=(1.0,) * int(found[1])),
    ),
    case(
        "report/trackers/registry.py: the tracker … has no option …",
        values(options={"foldr": "x"}),
        lambda lab: check_options("csv", load_tracker("csv"), lab.settings["options"]),
        r"its options: .*\b(folder)\b.*",
        lambda lab, found: lab.settings.update(options={found[1]: "x"}),
    ),
    case(
        "report/trackers/registry.py: there is no module … for the tracker …",
        lambda lab: (tracker_folder(lab), lab.settings.update(name="remedy_tracker:Own")),
        require,
        r"install it, or name its folder in (PYTHONPATH)",
        fixed(path="mine"),
    ),
    case(
        "tasks/task/loading.py: class … needs the argument …",
        values(args={}),
        lambda lab: load_task(TaskConfig(name=f"{__name__}:Needs", **lab.settings)),
        r"give task\.args\.(\w+) a value \(its arguments: width\)",
        lambda lab, found: lab.settings.update(args={found[1]: 3}),
    ),
]
