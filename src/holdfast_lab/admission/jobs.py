"""Jobs, teams, and the rules of a queue: what the admission study is given. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite

from holdfast.errors import DataError
from holdfast_lab.traces.rows import cells_of


@dataclass(frozen=True)
class Job:
    """One training job in its fixed decomposition: pods of a node or of a part of one.

    Tensor parallelism stays inside a pod, and data parallelism spans the pods. Their gradients are
    summed once a step, by one ring for each device of a pod.

    submit_s: seconds from the start of the study. pods, devices: of the job, and of one pod.
    seconds: that it trains on all pods in the best place, with no slow node. compute_s: of a step
    on all pods. gradient_bytes: that one ring sums. microbatches: of one pod in a step, if all
    pods run. min_pods: an elastic job can train on so few; `pods` for a rigid one. priority: the
    larger goes first. estimate_s: what its owner says of `seconds`; never less.
    """

    name: str
    team: str
    submit_s: float
    pods: int
    devices: int
    seconds: float
    estimate_s: float
    priority: int = 0
    min_pods: int = 0
    compute_s: float = 1.0
    gradient_bytes: float = 0.0
    microbatches: int = 4

    @property
    def least_pods(self) -> int:
        return self.min_pods or self.pods

    @property
    def size(self) -> int:
        """Devices of all pods."""
        return self.pods * self.devices


@dataclass(frozen=True)
class Team:
    """A queue of its own, with a nominal quota of devices. borrow: devices above the quota that it
    may use while other teams leave theirs idle (Kueue: borrowingLimit)."""

    name: str
    quota: int
    borrow: float = inf


@dataclass(frozen=True)
class Rules:
    """What every admission policy is subject to, in seconds.

    save_s: between two checkpoints; an eviction loses what came after the last. start_s: from
    the last pod's place to the first step. resize_s: pause of an elastic job that changes its pods.
    group_timeout_s: pods of an incomplete group give their devices back after it (600: the
    join_timeout of torch's rendezvous). backoff_s, max_backoff_s: until such a job may try again,
    doubled each time (Kueue: waitForPodsReady, 60 s to 3,600 s). evicted_save: whether an evicted
    job saves before it ends, so that it loses nothing. reclaims: a team within its quota takes
    borrowed devices back. Without it, the team waits until they are free.
    """

    save_s: float = 1800.0
    start_s: float = 120.0
    resize_s: float = 15.0
    group_timeout_s: float = 600.0
    backoff_s: float = 60.0
    max_backoff_s: float = 3600.0
    evicted_save: bool = False
    reclaims: bool = True


# --- a file of jobs -------------------------------------------------------------------------------
NEEDED = ("team", "submit_s", "pods", "devices", "seconds")
_LEAST = {"pods": 1, "devices": 1, "microbatches": 1, "priority": None}
_WHOLE = ("pods", "devices", "priority", "min_pods", "microbatches")
_TEXTS = ("name", "team")
_POSITIVE = ("seconds", "compute_s")
COLUMNS = tuple(field.name for field in fields(Job))


def read_jobs(text: str, source: str) -> tuple[Job, ...]:
    """Jobs in the order of their submission. Raises DataError with file, line and remedy."""
    rows = cells_of(text.removeprefix("\ufeff"), source)
    _, head = next(rows, (1, []))
    unknown = [name for name in head if name not in COLUMNS]
    missing = [name for name in NEEDED if name not in head]
    if unknown or missing or len(set(head)) < len(head):
        raise DataError(
            f"the columns are {', '.join(head)[:80] or 'none'}",
            where=f"{source}:1",
            remedy=f"write {','.join(NEEDED)}, and of {','.join(sorted(set(COLUMNS) - {*NEEDED}))} "
            "what is known, each once",
        )
    jobs = list(_jobs(rows, head, source))
    if not jobs:
        raise DataError(
            "there is no job", where=source, remedy="write one job a line, below the names"
        )
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


def format_jobs(jobs: tuple[Job, ...]) -> str:
    """The file that `read_jobs` reads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(job, name) for name in COLUMNS] for job in jobs)
    return out.getvalue()


def _jobs(rows: Iterator[tuple[int, list[str]]], head: list[str], source: str) -> Iterator[Job]:
    for number, row in rows:
        where = f"{source}:{number}"
        if len(row) != len(head):
            raise DataError(
                f"there are {len(row)} values and {len(head)} columns",
                where=where,
                remedy="write one value for each column",
            )
        given = {name: cell for name, cell in zip(head, row, strict=True) if cell}
        yield _job(given, number, where)


def _job(given: Mapping[str, str], number: int, where: str) -> Job:
    if missing := [name for name in NEEDED if name not in given]:
        raise DataError(
            f"{missing[0]} is empty", where=where, remedy=f"write a value for {missing[0]}"
        )
    value = {name: _number(name, cell, where) for name, cell in given.items() if name not in _TEXTS}
    job = Job(
        name=given.get("name", f"job{number - 1}"),
        team=given["team"],
        submit_s=value["submit_s"],
        pods=int(value["pods"]),
        devices=int(value["devices"]),
        seconds=value["seconds"],
        estimate_s=value.get("estimate_s", value["seconds"]),
        priority=int(value.get("priority", 0)),
        min_pods=int(value.get("min_pods", 0)),
        compute_s=value.get("compute_s", 1.0),
        gradient_bytes=value.get("gradient_bytes", 0.0),
        microbatches=int(value.get("microbatches", 4)),
    )
    if job.min_pods > job.pods:
        raise DataError(
            f"min_pods is {job.min_pods}, and the job has {job.pods} pods",
            where=where,
            remedy="write at most the number of pods; 0 for a job that is not elastic",
        )
    return job


def _number(name: str, cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    least = _LEAST.get(name, 0)
    is_right = isfinite(value) and (least is None or value >= least)
    is_right &= value == int(value) if is_right and name in _WHOLE else True
    if not is_right or (name in _POSITIVE and value == 0):
        kind = "a whole number" if name in _WHOLE else "a number"
        bound = "" if least is None else f", {least} or more"
        bound = ", above 0" if name in _POSITIVE else bound
        raise DataError(f"{name} is {cell!r}", where=where, remedy=f"write {kind}{bound}")
    return value
