"""From a fault to the next committed step: by rung of the recovery ladder, and beside others.

Four workers train a model of 0.7 M parameters, each in a process of its own, with steps in which
they mostly wait, as for an accelerator (so that four fit onto few cores). Something befalls them
somewhere in a step, again and again; between two faults all are there again.

    step s       the time of a step before, and among those who are left after it
    to next s    from SIGKILL (an exception being raised, a notice) to the next step that is
                 committed in the generation that follows; CPU: seconds of the whole machine
                 meanwhile
    beyond s     what of that is more than one step of those who are left
    lost         steps that were done again, or computed and given up

Ours by rung: 0 replica lost, 1 error without loss of a process, 2 process lost and replaced by a
standby, 4 node lost and nothing in its place; a planned move is a node that is told to go.
torchrun starts everybody anew from a checkpoint of DCP; torchft is told of a loss by its lighthouse
after 0.5 s; Ray Train starts the group anew.

    python -m benchmarks.recovery [NAME ...] [--peers-python PYTHON] [--step 0.5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.recovering import others, ours
from benchmarks.recovering.lines import Found, SilentError

HEAD = (
    f"{'':<24}{'n':>4}{'step s':>9}{'after':>8}{'to next s':>11}{'worst':>8}{'beyond s':>10}"
    f"{'worst':>8}{'CPU s':>8}{'lost':>6}"
)


def row(name: str, found: list[Found]) -> str:
    seconds, beyond = [f.seconds for f in found], [f.beyond for f in found]
    return (
        f"{name:<24}{len(found):4d}{statistics.median(f.before for f in found):9.3f}"
        f"{statistics.median(f.after for f in found):8.3f}"
        f"{statistics.median(seconds):11.3f}{max(seconds):8.3f}"
        f"{statistics.median(beyond):10.3f}{max(beyond):8.3f}"
        f"{statistics.median(f.cpu for f in found):8.2f}{max(f.lost for f in found):6d}"
    )


def floors() -> str:
    """What is measured in the same run of bare processes."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovering.floors"], capture_output=True, text=True,
        check=True, env=ours.environment(), cwd=ours.ROOT,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return (
        f"floors: SIGKILL to the error in a bare gloo group {found['error'] * 1e3:.1f} ms, a new "
        f"group of three {found['regroup'] * 1e3:.1f} ms, import torch {found['import']:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of rows")
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step waits")
    parser.add_argument("--rounds", type=int, default=0, help="faults a row, in place of its own")
    parser.add_argument("--seconds", type=float, default=60.0, help="deadline of each wait")
    parser.add_argument(
        "--peers-python", default="", help="interpreter of the peers; none: no peer"
    )
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    wanted = tuple(settings.names)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = ours.prepare(folder)
        print(HEAD, flush=True)
        for case in ours.CASES:
            if wanted and not case.name.startswith(wanted):
                continue
            if settings.rounds and case.rounds > 1:
                case = replace(case, rounds=settings.rounds)
            try:
                found = ours.measure(case, run_file, settings.step, settings.seconds)
                print(row(case.name, found), flush=True)
            except SilentError as error:
                failed = True
                print(f"{case.name:<24} {error}", flush=True)
        for peer in others.PEERS if settings.peers_python else ():
            if wanted and not peer.name.startswith(wanted):
                continue
            try:
                found = others.measure(
                    peer, settings.peers_python, folder / peer.loop, settings.step,
                    settings.rounds or 3, settings.seconds,
                )  # fmt: skip
                print(row(peer.name, found), flush=True)
            except SilentError as error:
                print(f"{peer.name:<24} no result: {error}", flush=True)
    if not wanted or "floors" in wanted:
        print(floors())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
