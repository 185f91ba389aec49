"""Remedies of messages about simulated runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from holdfast.show.output import check_target, make_folder, only_writer
from holdfast_lab.commands.simulate_inputs import StudyInputs
from holdfast_lab.commands.simulate_mix import mix
from holdfast_lab.engine.asked_study import Asked, study_of
from holdfast_lab.engine.run_journal import JournalObserver
from holdfast_lab.engine.settings import as_number, parse_setting
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_runs import (
    at_folder,
    attempt,
    check_version,
    folder_check,
    line,
    replace,
)

RUN = """\
name: small
device: cuda
model: {preset: tiny, vocab_size: 1000, max_position: 512}
data: {sequence_length: 512}
train: {steps: 4, batch_size: 32, precision: bf16}
"""


def _hold(folder: Path) -> ExitStack:
    """A command that writes into a folder, until the stack is closed."""
    stack = ExitStack()
    stack.enter_context(only_writer(folder))
    return stack


def _enter(writing: AbstractContextManager[None]) -> None:
    with writing:
        pass


def run_file(lab: Lab) -> None:
    lab.write("run.yaml", RUN)


def simulate(lab: Lab) -> None:
    given = {"made": "spot", "days": 0.01, **lab.settings}
    asked = Asked(Path(lab.path("run.yaml")), cluster="2x1xA100-80", **given)
    study_of(asked, StudyInputs(asked))


def begin_folder(lab: Lab) -> None:
    folder = Path(lab.path(lab.settings["out"]))
    make_folder(folder)
    JournalObserver.begin(folder, {})


PRICES = """\
date,machine_type,region,usd_per_hour_on_demand,usd_per_hour_spot
2023-05-08,m,mars-1,3.0,1.0
2023-09-08,m,mars-1,3.0,1.0
"""


def mix_lab(**settings: Any) -> Callable[[Lab], None]:
    def prepare(lab: Lab) -> None:
        lab.write("c.json", '{"metadata": {"gap_seconds": 900}, "data": [1, 1, 1, 0]}')
        lab.write("prices.csv", PRICES)
        given = {"spot": ["us-east-1=0.5"], "deadline": 20.0, "begin": "", "machine": ""}
        zone = f"us-east-1c={lab.path('c.json')}"
        lab.settings.update(given | {"zone": zone} | settings)

    return prepare


def mixed(lab: Lab) -> None:
    given = lab.settings
    uses_table = (given["machine"] or given["begin"]) and not given.get("lacks_prices")
    mix(
        [given["zone"]],
        10.0,
        1,
        given["deadline"],
        on_demand=3.0,
        spot=given["spot"],
        prices=Path(lab.path("prices.csv")) if uses_table else None,
        machine=given["machine"],
        prices_from=given["begin"],
        replays=2,
    )


def make_simulated(lab: Lab) -> None:
    """Turn the finished run into one that looks simulated, next to a copy that stays as it was."""
    shutil.copytree(lab.folder / "run", lab.folder / "real")
    path = lab.folder / "run" / "resolved.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"simulated": "holdfast"}))


GPUS = "date,machine_type,region,usd_per_hour_spot\n2024-01-01,g,east,1\n2024-01-02,g,west,2\n"


def priced(lab: Lab) -> None:
    run_file(lab)
    files = {"p3.csv": "0,add,a\n0,add,b\n60000,remove,a\n", "prices.csv": GPUS}
    traces = tuple(lab.write(name, text) for name, text in files.items())
    lab.settings.update(traces=traces, made="", days=None)


CASES: list[Case] = [
    case(
        "holdfast_lab/traces/places.py: the trace has …, and no node is in one of them",
        priced,
        simulate,
        r"choose one with --zone and --gpu, such as --zone '(\w+)' --gpu '(\w+)'",
        lambda lab, found: lab.settings.update(zones=(found[1],), gpu=found[2]),
    ),
    case(
        "holdfast_lab/traces/levels.py: this table has no …",
        lambda lab: (priced(lab), lab.settings.update(zones=("north",), gpu="g")),
        simulate,
        r"choose with --zone one of: (\w+), \w+",
        lambda lab, found: lab.settings.update(zones=(found[1],)),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: … has no effect with --make",
        lambda lab: (run_file(lab), lab.settings.update(zones=("east",))),
        simulate,
        "leave it out, or name files with --trace",
        fixed(zones=()),
    ),
    case(
        "launch/run/run_folder.py: this is the folder of a simulated run, "
        "which cannot be continued",
        at_folder("run", change=make_simulated),
        folder_check(check_version),
        r"choose another with folder=\.\.\., or .*",
        fixed(folder="new"),
    ),
    case(
        "cli/data_audit.py: this run was simulated, so no sample was used",
        line("data audit {root}/run", make_simulated),
        attempt,
        "name a run that was trained",
        lambda lab, found: replace(lab.path("run"), lab.path("real"))(lab, found),
    ),
    case(
        "holdfast_lab/engine/settings.py: … is no setting",
        lambda lab: lab.settings.update(text="store_interval_s"),
        lambda lab: parse_setting(lab.settings["text"], "--sweep"),
        r"write key=value, and commas between values: (\S+)",
        lambda lab, found: lab.settings.update(text=found[1]),
    ),
    case(
        "holdfast_lab/engine/settings.py: … is …",
        lambda lab: lab.settings.update(text="-4"),
        lambda lab: as_number("detection_s", lab.settings["text"], "--set"),
        "give a number of (0) or more",
        lambda lab, found: lab.settings.update(text=found[1]),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: there is no trace | --trace and --make name two "
        "traces",
        lambda lab: (run_file(lab), lab.settings.update(made="")),
        simulate,
        r"give one of: --trace FILE, --make (\w+)",
        lambda lab, found: lab.settings.update(made=found[1]),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: there is no setting …",
        lambda lab: (run_file(lab), lab.settings.update(given=("pause=3",))),
        simulate,
        "docs/studies/simulate.md has the names; a key of the run file goes without --set",
        fixed(given=("detection_s=3",)),
    ),
    case(
        "holdfast_lab/rivals/registry.py: there is no policy …",
        lambda lab: (run_file(lab), lab.settings.update(policies=("pray",))),
        simulate,
        r"use (\w+), .*",
        lambda lab, found: lab.settings.update(policies=(found[1],)),
    ),
    case(
        "show/output.py: the folder cannot be made: …",
        lambda lab: (lab.write("taken", "a file"), lab.settings.update(out="taken/run")),
        begin_folder,
        "give a path in a folder that you can write to",
        fixed(out="made"),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: min_interval_s is …, and max_interval_s is …",
        lambda lab: (run_file(lab), lab.settings.update(given=("max_interval_s=0.5",))),
        simulate,
        "give a max_interval_s of (\\d+) or more",
        lambda lab, found: lab.settings.update(given=(f"max_interval_s={found[1]}",)),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: … has no effect, because the trace says which nodes "
        "there are",
        lambda lab: (
            run_file(lab),
            lab.write("p3.csv", "0,add,a\n0,add,b\n60000,remove,a\n"),
            lab.settings.update(
                traces=(Path(lab.path("p3.csv")),), made="", given=("spares=2",), days=None
            ),
        ),
        simulate,
        "leave (spares) out, or make a trace with --make spot",
        fixed(given=()),
    ),
    case(
        "holdfast_lab/engine/run_journal.py: this folder is not empty",
        lambda lab: (run_file(lab), lab.write("full/file", ""), lab.settings.update(out="full")),
        begin_folder,
        "give --out a folder that does not exist; a study continues only with .*",
        fixed(out="made"),
    ),
    case(
        "show/output.py: another command is writing into this folder",
        lambda lab: lab.settings.update(out="busy", held=_hold(Path(lab.path("busy")))),
        lambda lab: _enter(only_writer(Path(lab.path(lab.settings["out"])))),
        "wait until it ends, or give --out another path",
        fixed(out="free"),
    ),
    case(
        "holdfast_lab/commands/trace_make.py: … is named … times",
        lambda lab: (
            run_file(lab),
            lab.settings.update(given=("detection_s=1", "detection_s=2")),
        ),
        simulate,
        r"name (\w+) once",
        lambda lab, found: lab.settings.update(given=(f"{found[1]}=2",)),
    ),
    case(
        "holdfast_lab/engine/asked_study.py: … has … values",
        lambda lab: (run_file(lab), lab.settings.update(given=("detection_s=1,2",))),
        simulate,
        r"give one, or compare them with --sweep (\S+)",
        lambda lab, found: lab.settings.update(given=(), sweeps=(found[1],)),
    ),
    case(
        "show/output.py: this is a folder | there is no folder for this file",
        lambda lab: lab.settings.update(out="absent/chart.svg"),
        lambda lab: check_target(Path(lab.path(lab.settings["out"])), "--svg"),
        "give a file in a folder that exists",
        fixed(out="chart.svg"),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: … is the name of no --zone",
        mix_lab(spot=["mars=0.61"]),
        mixed,
        r"use one of: (\S+), \S+",
        lambda lab, found: lab.settings.update(spot=[f"{found[1]}=0.61"]),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: --… has no effect without --prices",
        lambda lab: (mix_lab()(lab), lab.settings.update(lacks_prices=True, machine="m")),
        mixed,
        "leave it out, or add --prices FILE",
        fixed(lacks_prices=False),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: the table has prices of several machine types",
        mix_lab(begin="2023-05-08"),
        mixed,
        "add --machine TYPE",
        fixed(machine="m"),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: … is outside of …",
        mix_lab(machine="m", begin="1999-01-01"),
        mixed,
        r"give a date from (\S+) to \S+",
        lambda lab, found: lab.settings.update(begin=found[1]),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: … is no zone",
        mix_lab(zone="c.json"),
        mixed,
        r"write NAME=FILE: us-east-1c=(\S+)",
        lambda lab, found: lab.settings.update(zone=f"us-east-1c={lab.path(found[1])}"),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: … is no price",
        mix_lab(spot=["0.61"]),
        mixed,
        r"write NAME=DOLLARS: (\S+)",
        lambda lab, found: lab.settings.update(spot=[found[1]]),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: zone … has no price",
        mix_lab(spot=[]),
        mixed,
        r"add --spot (\S+)=DOLLARS and --on-demand DOLLARS, or --prices FILE with --machine TYPE",
        lambda lab, found: lab.settings.update(spot=[f"{found[1]}=0.5"]),
    ),
    case(
        "holdfast_lab/commands/simulate_mix.py: … is no date",
        mix_lab(begin="27 August", machine="m"),
        mixed,
        r"write it as (\S+)",
        lambda lab, found: lab.settings.update(begin=found[1]),
    ),
    case(
        "holdfast_lab/engine/spot_mix.py: … nodes that are always there need … h",
        mix_lab(deadline=1.0),
        mixed,
        r"give (\S+) hours or more",
        lambda lab, found: lab.settings.update(deadline=float(found[1])),
    ),
    case(
        "holdfast_lab/engine/spot_mix.py: there is no price of … in …",
        mix_lab(spot=[], machine="m"),
        mixed,
        r"use a zone of (\S+)",
        lambda lab, found: lab.settings.update(
            machine="m", zone=f"{found[1]}a={lab.path('c.json')}"
        ),
    ),
]
