"""Remedies of studies, carried out."""

from __future__ import annotations

from pathlib import Path

from holdfast.policy.prediction.predictor import FittedModels
from holdfast_lab.chaos.layouts import parse_layout
from holdfast_lab.chaos.sample_run import write_run_file
from holdfast_lab.commands import predict
from holdfast_lab.commands.score import scenarios_of
from holdfast_lab.commands.trace_show import parameters_of
from holdfast_lab.engine.run_journal import JournalObserver
from holdfast_lab.engine.settings import parse_setting
from holdfast_lab.score.harness.trainer import trainer_named
from holdfast_lab.traces.generators import make_trace
from holdfast_lab.traces.reading import load_trace
from holdfast_lab.traces.stream_file import format_stream
from tests.runtime.cli.remedies.lab import Case, Lab, fixed, setting, values


def name_trainer(lab: Lab) -> None:
    trainer_named(str(lab.settings["trainer"]).replace("HERE", str(lab.folder)))


def judge(lab: Lab) -> None:
    fitted = FittedModels.from_text(Path(lab.path("m.json")).read_text(), "m.json")
    [stream] = predict.read_histories([Path(lab.path("t.jsonl"))], None, None, 0)
    predict.judge_stream(fitted, stream, lab.settings.get("since", 0.0) * stream.seconds)


def write_trace(lab: Lab, name: str = "t.jsonl") -> None:
    lab.write(name, "".join(f"{line}\n" for line in format_stream(make_trace("spot", 0, 1.0, {}))))


def write_fit(lab: Lab) -> None:
    write_trace(lab)
    predict.fit(
        [Path(lab.path("t.jsonl"))], Path(lab.path("m.json")), 1200.0, 0.9, False, 1, None, None, 0
    )


RUN = """\
name: small
device: cuda
model: {preset: tiny, vocab_size: 1000, max_position: 512}
data: {sequence_length: 512}
train: {steps: 4, batch_size: 32, precision: bf16}
"""


def run_file(lab: Lab) -> None:
    lab.write("run.yaml", RUN)


def begin_journal(lab: Lab) -> None:
    folder = Path(lab.path(lab.settings["out"]))
    folder.mkdir(exist_ok=True)
    JournalObserver.begin(folder, {})


CASES: list[Case] = [
    Case(
        "holdfast_lab/chaos/layouts.py",
        values(text="tp=2,workers=3"),
        lambda lab: parse_layout(lab.settings["text"]),
        r"use (?:workers=\d+ or )?(workers=\d+)",
        lambda lab, match: lab.settings.update(text=f"tp=2,{match[1]}"),
    ),
    Case(
        "holdfast_lab/chaos/sample_run.py",
        lambda lab: (lab.write("run.yaml", "name: mine\n"), lab.settings.update(out="")),
        lambda lab: write_run_file(lab.folder / lab.settings["out"]),
        r"disturb it with: holdfast chaos \S+, or name another --out",
        fixed(out="other"),
    ),
    Case(
        "holdfast_lab/score/harness/trainer.py",
        values(trainer="luck"),
        name_trainer,
        r"use one of (holdfast), .*, or FILE.py:CLASS",
        setting("trainer"),
    ),
    Case(
        "holdfast_lab/commands/predict.py",
        lambda lab: (write_fit(lab), lab.settings.update(since=1.0)),
        judge,
        "give a longer trace, or an earlier --since",
        fixed(since=0.5),
    ),
    Case(
        "holdfast_lab/commands/score.py",
        values(level=2),
        lambda lab: scenarios_of("", lab.settings["level"]),
        r"use (0) \(simulated\) or 1 \(real processes\)",
        setting("level", int),
    ),
    Case(
        "holdfast_lab/engine/run_journal.py",
        lambda lab: (run_file(lab), lab.write("full/file", ""), lab.settings.update(out="full")),
        begin_journal,
        "give --out a folder that does not exist; a study continues only with .*",
        fixed(out="made"),
    ),
    Case(
        "holdfast_lab/commands/trace_show.py",
        values(words=["nodes"]),
        lambda lab: parameters_of(lab.settings["words"]),
        "write key=number, such as --set (nodes=32)",
        lambda lab, match: lab.settings.update(words=[match[1]]),
    ),
    Case(
        "policy/prediction/predictor.py",
        lambda lab: (write_trace(lab), lab.write("m.json", "{}")),
        judge,
        "make one with `holdfast predict fit TRACE --to FILE`",
        lambda lab, match: write_fit(lab),
    ),
    Case(
        "holdfast_lab/engine/settings.py",
        values(text="store_interval_s"),
        lambda lab: parse_setting(lab.settings["text"], "--sweep"),
        r"write key=value, and commas between values: (\S+)",
        setting("text"),
    ),
    Case(
        "holdfast_lab/traces/reading.py",
        values(text="nothing"),
        lambda lab: load_trace(lab.settings["text"], "t"),
        r"give rows '(time_ms,add\|remove,node)', .*",
        fixed(text="0,add,a\n9,remove,a\n"),
    ),
]
