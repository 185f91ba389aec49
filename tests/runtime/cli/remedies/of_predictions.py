"""Remedies of messages about predictors: their fit, their file, what they are judged on."""

from __future__ import annotations

from pathlib import Path

from holdfast.elastic.notices.prediction import load_prediction_watch
from holdfast.policy.prediction.predictor import FittedModels
from holdfast_lab.commands import predict as command
from holdfast_lab.prediction.fitting import TrainingPart, fit_models
from holdfast_lab.prediction.reading import label_zone
from holdfast_lab.prediction.samples import take_samples
from holdfast_lab.traces.generators import make_trace
from holdfast_lab.traces.stream_file import format_stream
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed


def write_trace(lab: Lab, name: str = "t.jsonl") -> None:
    lab.write(name, "".join(f"{line}\n" for line in format_stream(make_trace("spot", 0, 1.0, {}))))


def fit(lab: Lab) -> FittedModels:
    made = label_zone(make_trace("spot", 0, lab.settings["days"], {}), "z")
    return fit_models([TrainingPart(made, made.seconds)], 1200.0)


def judge(lab: Lab) -> None:
    fitted = FittedModels.from_text(Path(lab.path("m.json")).read_text(), "m.json")
    [stream] = command.read_histories([Path(lab.path("t.jsonl"))], None, None, 0)
    command.judge_stream(fitted, stream, lab.settings.get("since", 0.0) * stream.seconds)


def write_fit(lab: Lab) -> None:
    write_trace(lab)
    command.fit(
        [Path(lab.path("t.jsonl"))], Path(lab.path("m.json")), 1200.0, 0.9, False, 1, None, None, 0
    )


def watch(lab: Lab) -> None:
    load_prediction_watch(lab.path("m.json"), "a")


def read(lab: Lab) -> None:
    names = [Path(lab.path(name)) for name in ("t.jsonl", "u.jsonl")]
    command.read_histories(names, lab.settings["zones"], None, 0)


CASES: list[Case] = [
    case(
        "holdfast_lab/prediction/samples.py: a horizon of … s gives … samples",
        lambda lab: lab.settings.update(horizon=0.001),
        lambda lab: take_samples(make_trace("spot", 0, 0.01, {}), lab.settings["horizon"]),
        r"give a --horizon of (\d+) or more, .*",
        lambda lab, found: lab.settings.update(horizon=float(found[1])),
    ),
    case(
        "holdfast_lab/prediction/fitting.py: a horizon of … s foresees … losses before the last "
        "fifth"
        " and … in it; a fit needs … and 1",
        lambda lab: lab.settings.update(days=0.02),
        fit,
        "give more traces or more of them with --until, or another --horizon",
        fixed(days=2.0),
    ),
    case(
        "policy/prediction/predictor.py: this is no fit of a predictor: …",
        lambda lab: (write_trace(lab), lab.write("m.json", "{}")),
        judge,
        "make one with `holdfast predict fit TRACE --to FILE`",
        lambda lab, found: write_fit(lab),
    ),
    case(
        "elastic/notices/prediction.py: … cannot be read: …",
        lambda lab: None,
        watch,
        "name a file that `holdfast predict fit TRACE --to FILE` wrote, or leave the key away",
        lambda lab, found: write_fit(lab),
    ),
    case(
        "holdfast_lab/commands/predict.py: no node works for a horizon of … s after … s",
        lambda lab: (write_fit(lab), lab.settings.update(since=1.0)),
        judge,
        "give a longer trace, or an earlier --since",
        fixed(since=0.5),
    ),
    case(
        "holdfast_lab/commands/predict.py: the numbers of files (…) and of values (…) differ",
        lambda lab: (
            write_trace(lab),
            write_trace(lab, "u.jsonl"),
            lab.settings.update(zones=["x", "y", "z"]),
        ),
        read,
        "give one for all files, or one for each, in their order",
        fixed(zones=["x"]),
    ),
]
