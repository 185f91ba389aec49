"""The table of `of_runs.py`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from holdfast.doctor.run import folder_of
from holdfast.launch.run.resume_checks import (
    refuse_unfit_state,
)
from holdfast.launch.run.run_folder import refuse_foreign
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, setting
from tests.runtime.cli.remedies.of_runs import (
    RUN,
    add,
    at_folder,
    attempt,
    attempt_address_space,
    begin_address_space,
    begin_branch,
    begin_run,
    change_file,
    check_end,
    check_version,
    damage_first,
    damage_newest,
    describe,
    enough_memory,
    first,
    folder_check,
    leave_out,
    limits,
    line,
    low,
    other_run,
    override,
    remove_commits,
    replace,
    restore_backup,
    start_over,
    train_again,
    train_branch,
    type_command,
)

SHOW, B, L, F, C, E = (
    "checkpoint/restore/inspect.py: ",
    "launch/run/branch.py: ",
    "launch/run/branch_config.py: ",
    "launch/run/run_folder.py: ",
    "checkpoint/bucket/copy.py: ",
    "export/weights.py: ",
)
TO = r"name another folder with --to"
ANOTHER = r"choose another with folder=\.\.\., or .*"
BRANCH = "branch {root}/run --at 3 --to {root}/new"

CASES: list[Case] = [
    case(
        SHOW + "there is no checkpoint here",
        line("checkpoint show {root}/run", remove_commits("*")),
        attempt,
        r"train the run first",
        train_again,
    ),
    case(
        SHOW + "there is no checkpoint of step …",
        line("checkpoint show {root}/run 4"),
        attempt,
        r"name 'newest' or one of these: (\d+).*",
        replace("4"),
    ),
    case(
        "cli/checkpoint_tools.py: this is the run itself",
        line("checkpoint copy {root}/run --to {root}/run"),
        attempt,
        r"name another folder",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        "cli/checkpoint_tools.py: this is not a folder",
        line("checkpoint copy {root}/run --to {root}/run.yaml"),
        attempt,
        r"name another one",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        C + "holds checkpoints of another run (…)",
        line("checkpoint copy {root}/run --to {root}/made", other_run),
        attempt,
        r"name a new folder",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        C + "the checkpoint is not whole: …",
        line("checkpoint copy {root}/run 6 --to {root}/new", damage_newest),
        attempt,
        r"copy another step; see which are intact with: holdfast checkpoint verify RUN",
        replace("6", "3"),
    ),
    case(
        E + "there is no whole checkpoint of step …",
        line("export {root}/run --to {root}/hf --step 4"),
        attempt,
        r"there are: (\d+).*",
        replace("4"),
    ),
    case(
        E + "this run has no checkpoint yet",
        line("export {root}/run --to {root}/hf", remove_commits("*")),
        attempt,
        r"train it first",
        train_again,
    ),
    case(
        E + "the run was not trained on chat data with a template",
        line("generate {root}/run the --tokens 1 --chat"),
        attempt,
        r"leave out (--chat)",
        leave_out("--chat"),
    ),
    case(
        "model/new_folder.py: this is not an empty folder",
        line("export {root}/run --to {root}/run"),
        attempt,
        r"name a new one",
        lambda lab, found: _set_to(lab, "hf"),
    ),
    case(
        B + "this exists, and a branch begins in a folder of its own",
        line("branch {root}/run --at 3 --to {root}/run.yaml"),
        attempt,
        TO,
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "this lies in the run that it continues, …",
        line("branch {root}/run --at 3 --to {root}/run/in"),
        attempt,
        r"name a folder outside of it with --to",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "(_make_folder)",
        line("branch {root}/run --at 3 --to {root}/run.yaml/new"),
        attempt,
        TO,
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "there is no checkpoint of step ……; there are those of: …",
        line("branch {root}/run --at 4 --to {root}/new"),
        attempt,
        r"name one of these steps with --at, or (newest)",
        replace("4", "3"),
    ),
    case(
        B + "the checkpoint of step … cannot be copied: …",
        line("branch {root}/run --at 6 --to {root}/new train.steps=9", damage_newest),
        attempt,
        r"see which are intact with: (holdfast checkpoint verify \S+)",
        replace("6", "3"),
    ),
    case(
        L + "holdfast branch sets … itself",
        line(BRANCH + " folder=x"),
        attempt,
        r"name it with --to",
        leave_out("folder=x"),
    ),
    case(
        L + "holdfast branch sets … itself",
        line(BRANCH + " branch_of=x@1"),
        attempt,
        r"leave it out",
        leave_out("branch_of=x@1"),
    ),
    case(
        L + "… cannot change in a branch: no checkpoint of … fits another value",
        line(BRANCH + " seed=9"),
        attempt,
        r"leave it out, or begin another run: holdfast train RUN.yaml folder=NEW",
        leave_out("seed=9"),
    ),
    case(
        L + "train.steps … leaves no step after step …",
        line("branch {root}/run --at 6 --to {root}/new"),
        attempt,
        r"add (train\.steps=\d+), or branch at an earlier step",
        add(),
    ),
    case(
        L + "train.steps … leaves no step after step …",
        line("branch {root}/run --at 6 --to {root}/new"),
        attempt,
        r"add train\.steps=\d+, or branch at an earlier step",
        replace("6", "3"),
    ),
    case(
        L + "the samples of the steps up to … were dealt in other batches (step …: … samples)",
        line(BRANCH + " train.batch_size=8"),
        attempt,
        r"use (train\.batch_size=\d+ '?train\.batch_warmup=.*)",
        add(),
    ),
    case(
        L + "checkpoint.bucket … holds the checkpoints of …",
        line(BRANCH, lambda lab: _give_bucket(lab)),
        attempt,
        r"give the branch a prefix of its own, or none: (\S+) or checkpoint.bucket=''",
        add(),
    ),
    case(
        "launch/run/resume_checks.py: this branch lies in … now, and its run file names the folder "
        "where it was made",
        begin_branch,
        train_branch,
        r"add '?(folder=[^']+)'?",
        lambda lab, found: lab.settings.update(overrides=[found[1]]),
    ),
    case(
        "launch/run/resume_checks.py: this run has done step …, and train.steps … would cut it",
        at_folder(RUN, "model.vocab_size=300", "train.steps=3"),
        folder_check(lambda folder, loaded: refuse_unfit_state(folder, loaded.config)),
        r"use (train\.steps=\d+) or more",
        override,
    ),
    case(
        "launch/run/resume_checks.py: this run did all … steps, but its last checkpoint is "
        "damaged: …",
        lambda lab: (begin_run(lab), damage_newest(lab)),
        check_end,
        r".* again in a run of its own: (holdfast branch .*)",
        type_command,
    ),
    case(
        "launch/run/resume_checks.py: this run did all … steps, but its last checkpoint is "
        "damaged: …",
        lambda lab: (begin_run(lab), damage_newest(lab), damage_first(lab)),
        check_end,
        r"no older one is intact either: start over with --fresh.*",
        lambda lab, found: shutil.rmtree(lab.folder / RUN),
    ),
    case(
        F + "… is a file, not a folder",
        at_folder("run.yaml/new"),
        folder_check(describe),
        ANOTHER.replace(", or .*", ""),
        fixed(folder="new"),
    ),
    case(
        F + "this folder is not a run folder and has things in it (…)",
        at_folder("other", change=lambda lab: lab.write("other/a", "x")),
        folder_check(lambda folder, loaded: refuse_foreign(folder)),
        r"choose another with folder=\.\.\., or empty it",
        fixed(folder="new"),
    ),
    case(
        F + "this folder is not a run folder and has things in it (…)",
        at_folder("other", change=lambda lab: lab.write("other/a", "x")),
        folder_check(lambda folder, loaded: refuse_foreign(folder)),
        r"choose another with folder=\.\.\., or empty it",
        lambda lab, found: (lab.folder / "other/a").unlink(),
    ),
    case(
        F + "the run was trained on dataset …, and data.folder holds …",
        at_folder(RUN),
        folder_check(check_version),
        r"name the folder of that dataset, or start over with --fresh.*",
        start_over,
    ),
    case(
        "launch/run/runs.py: there is no run here",
        line("report {root}/none"),
        attempt,
        r"name a run folder or bucket, or a run file that was trained",
        lambda lab, found: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    case(
        "launch/run/runs.py: this is not what 'holdfast train' wrote",
        line("checkpoint list {root}/run", change_file("resolved.json", lambda _: b"{")),
        attempt,
        r"restore it from a backup, or start over with --fresh.*",
        restore_backup,
    ),
    case(
        "doctor/run.py: there is no run here",
        line("doctor {root}/none"),
        lambda lab: folder_of(Path(lab.settings["line"][1])),
        r"name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        lambda lab, found: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    case(
        "cli/init.py: there is something here already, and init never overwrites",
        line("init {root}/run.yaml"),
        attempt,
        r"choose another name: (holdfast init .*)",
        type_command,
    ),
    case(
        "cli/init.py: there is no such folder",
        line("init {root}/none/run.yaml"),
        attempt,
        r"make it first: (mkdir -p .*)",
        first,
    ),
    case(
        "report/page/page.py: the report cannot be written: this is a folder",
        line("report {root}/run --output {root}"),
        attempt,
        r"name a file in it with --output",
        lambda lab, found: lab.settings["line"].__setitem__(-1, lab.path("page.html")),
    ),
    case(
        "report/page/page.py: the report cannot be written (…)",
        line("report {root}/run --output {root}/none/page.html"),
        attempt,
        r"make the folder first: (mkdir -p .*)",
        first,
    ),
    case(
        "cli/report.py: … has no effect with …",
        line("report {root}/run --json --trace {root}/page.json"),
        attempt,
        r"leave one of the two out",
        lambda lab, found: lab.settings.update(line=["report", lab.path(RUN), "--json"]),
    ),
    case(
        "cli/track.py: the run has no trackers",
        line("track {root}/run"),
        attempt,
        r"name one, for example: (--to csv)",
        add(),
    ),
    case(
        "cli/track.py: an option is written NAME=VALUE",
        line("track {root}/run --to csv --option folder"),
        attempt,
        r"for example --option mode=online",
        lambda lab, found: lab.settings["line"].__setitem__(-1, f"folder={lab.folder}/csv"),
    ),
    case(
        "report/trackers/registry.py: there is no tracker …",
        line("track {root}/run --to cvs"),
        attempt,
        r"use (\w+)",
        replace("cvs"),
    ),
    case(
        "launch/node/process_limits.py: a process may have … open files, and a run with … "
        "workers on a node needs …",
        low(files=20),
        limits,
        r"raise the hard limit: ulimit -Hn (\d+), or --ulimit nofile=\d+ of a container",
        setting("files", int),
    ),
    case(
        "launch/node/process_limits.py: this machine or container has …, and its workers need …",
        low(memory=1 << 20),
        limits,
        r"raise the limit, or use fewer workers or a smaller model",
        enough_memory,
    ),
    case(
        "launch/node/process_limits.py: a process may have … of address space (…), and a "
        "worker needs …",
        begin_address_space,
        attempt_address_space,
        r"raise it: ulimit -v unlimited",
        lambda lab, found: lab.settings.pop("limit"),
    ),
]


def _set_to(lab: Lab, name: str) -> None:
    words = lab.settings["line"]
    words[words.index("--to") + 1] = lab.path(name)


def _give_bucket(lab: Lab) -> None:
    path = lab.folder / RUN / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["config"]["checkpoint"]["bucket"] = f"file://{lab.folder}/bucket"
    path.write_text(json.dumps(resolved))
    os.makedirs(lab.folder / "bucket")
