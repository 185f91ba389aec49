"""Remedies of messages about the admission study: its jobs, teams, jitter and folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from re import Match

from holdfast_lab.admission.jobs_file import read_jobs
from holdfast_lab.admission.stragglers import profile_of_trace
from holdfast_lab.commands.simulate_admission import admission
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader
from tests.runtime.cli.remedies.lab import Case, Lab, case

HEAD = "team,submit_s,pods,devices,seconds"
FILE = "holdfast_lab/admission/jobs_file.py: "
ENGINE = "holdfast_lab/admission/engine.py: "


def rows(*lines: str, head: str = HEAD) -> Callable[[Lab], None]:
    """Give a file of jobs."""
    content = "\n".join((head, *lines)) + "\n"
    return lambda lab: lab.settings.update(text=content)


def mended(*lines: str, head: str = HEAD) -> Callable[[Lab, Match[str]], None]:
    """Write the file as the remedy says."""
    return lambda lab, found: rows(*lines, head=head)(lab)


def read(lab: Lab) -> None:
    read_jobs(lab.settings["text"], "jobs.csv")


def of_file(site: str, bad: Callable[[Lab], None], remedy: str, good: str) -> Case:
    return case(FILE + site, bad, read, remedy, mended(good))


def run(lab: Lab) -> None:
    """Call the command on a small cluster."""
    path = lab.write("jobs.csv", lab.settings.get("text", f"{HEAD}\nred,0,1,8,60\n"))
    given = {"cluster": "2x8xA100-80", "team": None, "out": None} | lab.settings
    out = Path(given["out"]) if given["out"] else None
    zones = given.get("zones", 1)
    admission(path, seeds=1, cluster=given["cluster"], zones=zones, team=given["team"], out=out)


def draw(lab: Lab) -> None:
    """Call the command without jobs on one device."""
    admission(None, seeds=1, cluster="1x1xA100-80", team=None, out=None, days=lab.settings["days"])


def jitter(lab: Lab) -> None:
    events = [TraceEvent(0.0, "join", "r0")]
    events += [
        TraceEvent(float(step), "slow", "r0", value=1.5, extra={"step": step})
        for step in range(lab.settings["steps"])
    ]
    profile_of_trace(EventStream(TraceHeader("t", "t"), tuple(events)))


def set_to(**values: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(values)


def then(**values: object) -> Callable[[Lab, Match[str]], None]:
    return lambda lab, found: lab.settings.update(values)


CASES: list[Case] = [
    case(
        FILE + "the columns are …",
        rows("red,0", head="team,start"),
        read,
        f"write {HEAD}, and of compute_s,.* what is known, each once",
        mended("red,0,1,8,60"),
    ),
    of_file("there is no job", rows(), "write one job a line, below the names", "red,0,1,8,60"),
    of_file(
        "there are … values and … columns",
        rows("red,0,1,8"),
        "write one value for each column",
        "red,0,1,8,60",
    ),
    of_file("… is empty", rows("red,0,,8,60"), "write a value for pods", "red,0,1,8,60"),
    case(
        FILE + "min_pods is …, and the job has … pods",
        rows("red,0,2,8,60,3", head=f"{HEAD},min_pods"),
        read,
        "write at most the number of pods; 0 for a job that is not elastic",
        mended("red,0,2,8,60,1", head=f"{HEAD},min_pods"),
    ),
    of_file("… is …", rows("red,0,1.5,8,60"), "write a whole number, 1 or more", "red,0,1,8,60"),
    case(
        ENGINE + "no job is submitted",
        set_to(days=0.02),
        draw,
        "give a larger --load or more --days, or name the jobs with --jobs",
        then(days=20.0),
    ),
    case(
        ENGINE + "job … is of team …, which has no quota",
        set_to(team=["blue=16"]),
        run,
        "give one with --team (red)=DEVICES",
        lambda lab, found: lab.settings.update(team=["blue=8", f"{found[1]}=8"]),
    ),
    case(
        ENGINE + "job … needs … pods of … devices, and the cluster has room for …",
        set_to(text=f"{HEAD}\nred,0,4,8,60\n"),
        run,
        "give a larger --cluster, or leave the job out",
        then(cluster="4x8xA100-80"),
    ),
    case(
        ENGINE + "job … needs … devices, and team … may use …",
        set_to(team=["red=4"]),
        run,
        "give it more with --team (red)=DEVICES, or leave the job out",
        lambda lab, found: lab.settings.update(team=[f"{found[1]}=8"]),
    ),
    case(
        "holdfast_lab/commands/simulate_admission.py: --… has no effect with …",
        set_to(zones=2),
        run,
        "leave --zones or --cluster out",
        then(zones=1),
    ),
    case(
        "holdfast_lab/commands/simulate_admission.py: … is no team with a quota",
        set_to(team=["red"]),
        run,
        "write NAME=DEVICES, such as --team (red=96)",
        lambda lab, found: lab.settings.update(team=[found[1]]),
    ),
    case(
        "holdfast_lab/admission/stragglers.py: this trace has no two steps in which a rank is slow",
        set_to(steps=0),
        jitter,
        "give a trace of operations, or leave --jitter out",
        then(steps=3),
    ),
]
