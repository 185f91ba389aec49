"""Remedies of messages about scores: options, weights, tables and trainers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

from holdfast_lab.commands import score as command
from holdfast_lab.score.harness.trainer import trainer_named
from holdfast_lab.score.record import RunRecord
from holdfast_lab.score.record_file import format_record, parse_record, parse_reference
from holdfast_lab.score.score import parse_weights
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, remove

SCORE, TRAINER = "holdfast_lab/commands/score.py: ", "holdfast_lab/score/harness/trainer.py: "
FILES = "holdfast_lab/score/record_file.py: "
RECORD = RunRecord("F0", 5, 10.0, ((0.0, 4),), (), (), 0.5, 10.0)


OWN = """
class Own:
    name = "own"
    def why_unavailable(self, python): ...
    def open(self, workplace): ...
"""


def given(**settings: Any) -> Callable[[Lab], object]:
    return lambda lab: lab.settings.update(settings)


def name_trainer(lab: Lab) -> None:
    trainer_named(str(lab.settings["trainer"]).replace("HERE", str(lab.folder)))


def read_weights(lab: Lab) -> None:
    parse_weights(lab.settings["text"], "w.json")


def as_written(lab: Lab, found: Match[str]) -> None:
    """Write what the remedy shows."""
    lab.settings["text"] = found[1]


def read_table(lab: Lab) -> None:
    parse_reference(lab.settings["text"], "t.json")


def read_record(lab: Lab) -> None:
    """As a campaign does: a record that is not there is made."""
    path = lab.folder / "r.json"
    if path.exists():
        parse_record(path.read_text(), str(path))
    else:
        path.write_text(format_record(RECORD))


def score_other(lab: Lab) -> None:
    """A trainer that this interpreter lacks; another one has it."""
    python = lab.settings.get("python", str(_without_torch(lab)))
    command.refuse_unavailable("torchrun-dcp", python)


def score_in_one_network(lab: Lab) -> None:
    """The raylets of Ray Train run in one network."""
    command.refuse_without_network("ray-train", lab.settings["names"].split(","))


def _without_torch(lab: Lab) -> Path:
    path = lab.write("python", "#!/bin/sh\necho 'no module torch' >&2; exit 1\n")
    path.chmod(0o755)
    return path


CASES: list[Case] = [
    case(
        SCORE + "there is no level … here",
        given(level=2),
        lambda lab: command.scenarios_of("", lab.settings["level"]),
        r"use (0) \(simulated\) or 1 \(real processes\)",
        lambda lab, found: lab.settings.update(level=int(found[1])),
    ),
    case(
        SCORE + "level … has no scenario …",
        given(names="F99"),
        lambda lab: command.scenarios_of(lab.settings["names"], 1),
        r"use some of (F0), .*",
        lambda lab, found: lab.settings.update(names=found[1]),
    ),
    case(
        SCORE + "level 0 compresses no time",
        given(level=0),
        lambda lab: command.refuse_compression(lab.settings["level"], True),
        "leave it out, or use --level 1",
        fixed(level=1),
    ),
    case(
        SCORE + "… cannot run: …",
        given(),
        score_other,
        "or name an interpreter that has it with --python",
        fixed(python=sys.executable),
    ),
    case(
        SCORE + "this names no scenario",
        given(names=","),
        lambda lab: command.scenarios_of(lab.settings["names"], 1),
        r"use some of (F0), .*",
        lambda lab, found: lab.settings.update(names=found[1]),
    ),
    case(
        SCORE + "… has no effect at level …",
        given(level=0),
        lambda lab: command.refuse_without_effect(
            lab.settings["level"], "holdfast", "torchft", "", None
        ),
        r"leave --trainer out, or use --level (1)",
        lambda lab, found: lab.settings.update(level=int(found[1])),
    ),
    case(
        SCORE + "there is no network of nodes for …: …",
        given(names="F1,F9"),
        score_in_one_network,
        r"leave (F9) out",
        lambda lab, found: lab.settings.update(names="F1"),
    ),
    case(
        TRAINER + "there is no trainer …",
        given(trainer="luck"),
        name_trainer,
        r"use one of (holdfast), .*, or FILE.py:CLASS",
        lambda lab, found: lab.settings.update(trainer=found[1]),
    ),
    case(
        TRAINER + "there is no file …",
        given(trainer="HERE/own.py:Own"),
        name_trainer,
        "name a Python file that has the class, as FILE.py:CLASS",
        lambda lab, found: lab.write("own.py", OWN),
    ),
    case(
        TRAINER + "… has no …",
        lambda lab: (
            lab.settings.update(trainer="HERE/own.py:Other"),
            lab.write("own.py", OWN),
        ),
        name_trainer,
        r"name a class of that file, as FILE.py:CLASS \(docs/studies/score.md\)",
        fixed(trainer="HERE/own.py:Own"),
    ),
    case(
        TRAINER + "… cannot be loaded: …: ……",
        lambda lab: (
            lab.settings.update(trainer="HERE/own.py:Own"),
            lab.write("own.py", "import no_such_module"),
        ),
        name_trainer,
        r"run python \S+own.py, which shows the error, and mend it",
        lambda lab, found: lab.write("own.py", OWN),
    ),
    case(
        TRAINER + "class … of … lacks …",
        lambda lab: (
            lab.settings.update(trainer="HERE/own.py:Own"),
            lab.write("own.py", "class Own: name = 'own'\n"),
        ),
        name_trainer,
        r"add what holdfast_lab.score.harness.trainer.Trainer has \(docs/studies/score.md\)",
        lambda lab, found: lab.write("own.py", OWN),
    ),
    case(
        "holdfast_lab/score/score.py: this is no file of weights",
        given(text="[]"),
        read_weights,
        "write (.*)",
        as_written,
    ),
    case(
        "holdfast_lab/score/score.py: weights must be numbers of at least 0, one for each "
        "sub-score, "
        "and not all 0",
        given(text=json.dumps({"version": "v", "weights": {"RPO": 1}})),
        read_weights,
        "write (.*)",
        as_written,
    ),
    case(
        FILES + "this is no table of throughputs",
        given(text="{}"),
        read_table,
        r"write (\{.*\}), by nodes",
        as_written,
    ),
    case(
        FILES + "this is no record of a run",
        lambda lab: lab.write("r.json", "{}"),
        read_record,
        "remove it, and run the score again",
        remove("r.json"),
    ),
]
