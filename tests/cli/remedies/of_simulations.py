"""Remedies of messages about simulated runs."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.simulate_journal import JournalObserver
from holdfast.cli.simulate_request import Asked, study_of
from holdfast.simulate.engine.settings import as_number, parse_setting
from tests.cli.remedies.lab import Case, Lab, case, fixed

RUN = """\
name: small
device: cuda
model: {preset: tiny, vocab_size: 1000, max_position: 512}
data: {sequence_length: 512}
train: {steps: 4, batch_size: 32, precision: bf16}
"""


def run_file(lab: Lab) -> None:
    lab.write("run.yaml", RUN)


def simulate(lab: Lab) -> None:
    given = {"made": "spot", **lab.settings}
    study_of(Asked(Path(lab.path("run.yaml")), cluster="2x1xA100-80", days=0.01, **given))


CASES: list[Case] = [
    case(
        "simulate/engine/settings.py: … is no setting",
        lambda lab: lab.settings.update(text="store_interval_s"),
        lambda lab: parse_setting(lab.settings["text"], "--sweep"),
        r"write key=value, and commas between values: (\S+)",
        lambda lab, found: lab.settings.update(text=found[1]),
    ),
    case(
        "simulate/engine/settings.py: … is …",
        lambda lab: lab.settings.update(text="-4"),
        lambda lab: as_number("detection_s", lab.settings["text"], "--set"),
        "give a number of (0) or more",
        lambda lab, found: lab.settings.update(text=found[1]),
    ),
    case(
        "cli/simulate_request.py: there is no trace | --trace and --make name two traces",
        lambda lab: (run_file(lab), lab.settings.update(made="")),
        simulate,
        r"give one of: --trace FILE, --make (\w+)",
        lambda lab, found: lab.settings.update(made=found[1]),
    ),
    case(
        "cli/simulate_request.py: there is no setting …",
        lambda lab: (run_file(lab), lab.settings.update(given=("pause=3",))),
        simulate,
        "docs/simulate.md has the names; a key of the run file goes without --set",
        fixed(given=("detection_s=3",)),
    ),
    case(
        "cli/simulate_request.py: there is no policy …",
        lambda lab: (run_file(lab), lab.settings.update(policies=("pray",))),
        simulate,
        r"use (\w+)",
        lambda lab, found: lab.settings.update(policies=(found[1],)),
    ),
    case(
        "cli/simulate_journal.py: this folder is not empty",
        lambda lab: (run_file(lab), lab.write("full/file", ""), lab.settings.update(out="full")),
        lambda lab: JournalObserver.begin(Path(lab.path(lab.settings["out"])), {}),
        "give --out a folder that does not exist",
        fixed(out="made"),
    ),
]
