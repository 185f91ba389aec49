"""Time from a fault to the next committed step, by recovery rung, ours and other systems'.

Four workers train a model of 0.7 M parameters, each in a process of its own. In a step they mostly
wait, as for an accelerator, so that four fit onto few cores. Faults hit them again and again,
somewhere in a step. Between two faults all workers are back.

    step s       the time of a step before, and among the remaining workers after it
    to next s    from SIGKILL (an exception being raised, a notice) to the next step that is
                 committed in the generation that follows; CPU: seconds of all of the machine
                 meanwhile
    beyond s     the part of it beyond one step of the remaining workers, then beyond one step
                 before; the second is smaller, as fewer workers need longer for the same step
    lost         repeated steps: those that were committed before, and the step in flight if its
                 computed part was thrown away. A step is not lost if it continues from what the
                 remaining workers had computed (a worker that raised an exception in it computes
                 its own share again). If no worker remains, it is always lost
    rung         of the ladder, as the journal says

Ours by rung: 0 replica lost, 1 error without loss of a process, 2 one of four shards lost and
replaced by a standby. In rung 3 a node is lost and an idle one replaces it, in rung 4 nothing
replaces it. In rung 5 a lost node is back. There "to next s" is the length of the stall, from the
last step before to the first after. CPU counts from the start of its agent. In rung 6 all agents
are killed and started again by the same commands, from a checkpoint of every fifth step. In a
planned move a node receives a notice to leave. torchrun restarts all processes from a checkpoint of
DCP, of every fifth step, too. torchft learns of a loss from its lighthouse after 0.5 s. Ray Train
restarts the group.

Below the rows is each bar with the measured value, as a multiple of the floors. If the peers ran,
it is also shown as a share of theirs.

    python -m benchmarks.runtime.recovery [NAME ...] [--peers-python PYTHON] [--step S] [--rounds 3]
                                  [--set cluster.tls=false]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.recovering import others, ours
from benchmarks.runtime.recovering.lines import Found, SilentError

HEAD = (
    f"{'':<24}{'n':>4}{'step s':>9}{'after':>8}{'to next s':>11}{'worst':>8}{'beyond s':>10}"
    f"{'worst':>8}{'before':>10}{'worst':>8}{'CPU s':>8}{'lost':>6}{'rung':>6}"
)
FOOT = (
    "lost: steps committed before and done again, and the step in flight where what was computed\n"
    "of it was thrown away (told by those who stay; always where nobody stays), in all rows alike"
)


def row(name: str, found: list[Found]) -> str:
    seconds, beyond = [f.seconds for f in found], [f.beyond for f in found]
    before = [f.beyond_before for f in found]
    rungs = ",".join(str(rung) for rung in sorted({f.rung for f in found if f.rung >= 0}))
    return (
        f"{name:<24}{len(found):4d}{statistics.median(f.before for f in found):9.3f}"
        f"{statistics.median(f.after for f in found):8.3f}"
        f"{statistics.median(seconds):11.3f}{max(seconds):8.3f}"
        f"{statistics.median(beyond):10.3f}{max(beyond):8.3f}"
        f"{statistics.median(before):10.3f}{max(before):8.3f}"
        f"{statistics.median(f.cpu for f in found):8.2f}{max(f.lost for f in found):6d}{rungs:>6}"
    )


BARS: dict[str, tuple[float, tuple[str, float] | None]] = {
    "replica lost": (0.1, ("torchft 0.2", 0.1)),
    "error, nobody lost": (0.2, None),
    "worker lost, standby": (1.0, ("torchrun with DCP", 0.05)),
    "node lost, fewer": (2.0, None),
    "planned move": (0.5, None),
}
"""What the worst fault of a row may take beyond a step, in seconds, and its median as a share of
what a peer takes."""
LONG_STEP, LONG_BAR = 0.5, 0.2
"""With steps of so many seconds, a lost replica may take this."""


def verdicts(found: dict[str, list[Found]], step: float, floor: Mapping[str, float]) -> list[str]:
    """A line for each row that has a bar."""
    out = []
    for name, (bar, peer) in BARS.items():
        if name not in found:
            continue
        if name == "replica lost" and step >= LONG_STEP:
            bar = LONG_BAR
        worst = max(f.beyond for f in found[name])
        text = (
            f"{name}: worst {worst:.3f} s beyond a step, bar {bar:g} s: "
            f"{'held' if worst <= bar else 'MISSED'}; "
            f"{worst / (floor['error'] + floor['regroup']):.1f} times the floors' sum"
        )
        if peer is not None and peer[0] in found:
            theirs = statistics.median(f.beyond for f in found[peer[0]])
            share = statistics.median(f.beyond for f in found[name]) / theirs
            kept = "held" if share <= peer[1] else "MISSED"
            text += f"; {share:.3f} of {peer[0]}'s, bar {peer[1]:g}: {kept}"
        each = " ".join(f"{f.beyond:.3f}" for f in sorted(found[name], key=lambda f: f.beyond))
        out.append(f"{text}; each: {each}")
    moved = found.get("planned move")
    if moved:
        lost = max(f.lost for f in moved)
        out.append(f"planned move: {lost} steps lost, bar 0: {'held' if not lost else 'MISSED'}")
    return out


def floors() -> dict[str, float]:
    """What is measured in the same run of bare processes, in seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime.recovering.floors"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        cwd=ROOT,
    )
    found: dict[str, float] = json.loads(done.stdout)
    print(
        f"floors: SIGKILL to the error in a bare gloo group {found['error'] * 1e3:.1f} ms, a new "
        f"group of three {found['regroup'] * 1e3:.1f} ms, import torch {found['import']:.2f} s"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of rows")
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step waits")
    parser.add_argument("--rounds", type=int, default=0, help="faults a row, in place of its own")
    parser.add_argument("--seconds", type=float, default=60.0, help="deadline of each wait")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value of the run file, for ours"
    )
    parser.add_argument(
        "--peers-python", default="", help="interpreter of the peers; none: no peer"
    )
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    wanted = tuple(settings.names)
    failed = False
    rows: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = ours.prepare(folder)
        print(HEAD, flush=True)
        for case in ours.CASES:
            if wanted and not case.name.startswith(wanted):
                continue
            found = rows.setdefault(case.name, [])
            try:
                given = replace(case, settings=(*case.settings, *settings.set))
                for each in ours.measured(
                    given, run_file, settings.step, settings.seconds, settings.rounds
                ):
                    found.append(each)
            except SilentError as error:
                failed = True
                print(f"{case.name:<24} {error}; {len(found)} before that", flush=True)
            if found:
                print(row(case.name, found), flush=True)
        for peer in others.PEERS if settings.peers_python else ():
            if wanted and not peer.name.startswith(wanted):
                continue
            try:
                rows[peer.name] = others.measure(
                    peer,
                    settings.peers_python,
                    folder / peer.loop,
                    settings.step,
                    settings.rounds or 3,
                    settings.seconds,
                )
                print(row(peer.name, rows[peer.name]), flush=True)
            except SilentError as error:
                print(f"{peer.name:<24} no result: {error}", flush=True)
    print(FOOT, *verdicts(rows, settings.step, floors()), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
