"""`python -m tests.support.checkpoint_faults --seed S --cases N --only FAULT`: cases and their
outcomes.

Ends with 1 when a case failed; each failure is printed with the one command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.checkpoint_faults.catalog import FAULTS, FULL_DISK, Case, Outcome, cases, run

VERDICTS = ("newest", "older", "sentence", "nothing", "FAILED")
MEANING = """\
newest: restored the newest checkpoint, or a newer one that the interrupted save had committed
older: the newest was not whole; the newest good one was restored
sentence: nothing good was left, and one clear sentence said so
nothing: no checkpoint object was left at all"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.checkpoint_faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--case", type=int, help="this one alone, with --only")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", default=None)
    parser.add_argument("--skip", nargs="+", choices=FAULTS, metavar="FAULT", default=())
    parser.add_argument("--every-point", action="store_true", help="kill at every single point")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case, from the I-th on")
    parser.add_argument("--list", action="store_true", help="print every case")
    parser.add_argument("--json", action="store_true", help="print every case as a line of JSON")
    parser.add_argument("--folder", help="where run stores are made (default: a temporary folder)")
    options = parser.parse_args(arguments)
    every = [name for name in FAULTS if name != FULL_DISK]
    names = [name for name in options.only or every if name not in options.skip]
    if options.case is not None:
        chosen = [Case(options.seed, name, options.case) for name in names]
    else:
        chosen = list(cases(options.seed, options.cases, names, options.every_point))
    part, _, parts = options.part.partition("/")
    chosen = chosen[int(part) :: int(parts)]
    outcomes = []
    with TemporaryDirectory(prefix="campaign-", dir=options.folder or _memory()) as root:
        for case in chosen:
            outcomes.append(run(case, Path(root).resolve()))
            _say(outcomes[-1], options)
    if not options.json:
        print(table(outcomes))
    failed = [o for o in outcomes if o.verdict == "FAILED"]
    for outcome in failed:
        print(f"FAILED: {outcome.what}\n  again: {outcome.case.command}", file=sys.stderr)
    return 1 if failed else 0


def _memory() -> str | None:
    """Memory that looks like a disk, where there is some: the order of writes is what counts."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _say(outcome: Outcome, options: argparse.Namespace) -> None:
    case = outcome.case
    if options.json:
        line = {
            "seed": case.seed,
            "fault": case.fault,
            "number": case.number,
            "verdict": outcome.verdict,
            "what": outcome.what,
        }
        print(json.dumps(line), flush=True)
    elif options.list or options.case is not None:
        print(f"{case.fault} {case.number}: {outcome.verdict}: {outcome.what}", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per fault."""
    rows = [("fault", "cases", *VERDICTS, "ms a case")]
    for name in [*FAULTS, ""]:
        mine = [o for o in outcomes if name in (o.case.fault, "")]
        if not mine:
            continue
        count = Counter(o.verdict for o in mine)
        each = 1000 * sum(o.seconds for o in mine) / len(mine)
        numbers = [str(count[verdict] or "") for verdict in VERDICTS]
        rows.append((name or "all", str(len(mine)), *numbers, f"{each:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([*lines, "", MEANING])


if __name__ == "__main__":
    sys.exit(main())
