"""Make the two pictures of README.md from a real run: a terminal, and the curve of the report.

python tools/pictures.py     trains twice for some minutes, kills a worker of the second run

The terminal shows what `holdfast train` drew some steps after the kill, and what
`holdfast checkpoint diff` printed at the end. The curve is the one in the report page. The tool
writes docs/pictures/terminal.svg and docs/pictures/curve.svg. Times differ from run to run.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))  # kill_once.py

from kill_once import command, empty, train_with_a_kill  # noqa: E402

from holdfast.events import StepDone, WorkerLost, WorkerStarted  # noqa: E402
from holdfast.report.formatting import format_clock  # noqa: E402
from holdfast.report.history.progress import RunProgress  # noqa: E402
from holdfast.report.ledger.ordering import order_records  # noqa: E402
from holdfast.report.live.live import picture  # noqa: E402
from holdfast.report.page.css import style_sheet  # noqa: E402
from holdfast.wire.journal import read_journal  # noqa: E402
from holdfast.wire.store.run_location import store_of_run  # noqa: E402

RUN_FILE = "examples/quickstart/run.yaml"
STEPS, KILL_AT, SHOWN_AT = 300, 120, 200
KEYS = (f"train.steps={STEPS}", "layout.workers=4", "train.evaluate.every=100")
UNDISTURBED, KILLED = Path("runs/undisturbed"), Path("runs/killed")
OUT = ROOT / "docs/pictures"
WIDTH = 100  # columns of the terminal
LINES = 30  # rows of the live view

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
FIGURE = re.compile(r'<figure class="wide">(.*?)<svg ([^>]*)>(.*?)</svg>', re.DOTALL)
KEY = re.compile(r'--key:(var\([^)]+\));--stroke:(\w+)">([^<]*)<')
DASHES = {"solid": "none", "dashed": "6 4", "dotted": "1 3"}


def main() -> None:
    """Train, kill, compare, and write both pictures."""
    empty(UNDISTURBED, KILLED)
    command("train", RUN_FILE, *KEYS, f"folder={ROOT / UNDISTURBED}")
    words = ("train", RUN_FILE, *KEYS, f"folder={ROOT / KILLED}")
    train_with_a_kill(*words, folder=KILLED, at_step=KILL_AT)
    diff = ("checkpoint", "diff", str(UNDISTURBED), str(KILLED))
    said = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *diff],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    command("report", KILLED)
    OUT.mkdir(exist_ok=True)
    (OUT / "terminal.svg").write_text(terminal(said))
    (OUT / "curve.svg").write_text(curve((KILLED / "report.html").read_text()))
    print(f"wrote {OUT}/terminal.svg and {OUT}/curve.svg")


def terminal(diff: str) -> str:
    """Return a terminal with the live view some steps after the kill, and the comparison."""
    console = Console(width=WIDTH, file=io.StringIO(), record=True, force_terminal=True)
    progress, pids, kill = RunProgress(STEPS), dict[int, int](), ("", "")
    for record in order_records(read_journal(store_of_run(KILLED))):
        progress.observe(record)
        if isinstance(record.event, WorkerStarted):
            pids.setdefault(record.event.rank, record.event.pid)
        if isinstance(record.event, WorkerLost) and not kill[0]:
            at = format_clock(progress.ledger.running)
            kill = f"kill -9 {pids[record.event.rank]}", f"  # at {at}, from another terminal"
        if isinstance(record.event, StepDone) and record.event.step == SHOWN_AT:
            break
    _prompt(console, f"holdfast train {RUN_FILE} folder={KILLED}")
    console.print(picture(progress, WIDTH, LINES))
    _prompt(console, *kill)
    console.print()
    _prompt(console, f"holdfast checkpoint diff {UNDISTURBED} {KILLED}")
    console.print(Text(diff.strip()))
    return FONTS.sub("", console.export_svg(title="a worker is killed", unique_id="t"))


def _prompt(console: Console, words: str, comment: str = "") -> None:
    console.print(Text.assemble(("$ ", "green"), (words, "bold"), (comment, "dim")))


def curve(page: str) -> str:
    """Return the loss of a report page as a picture of its own, with its key."""
    found = FIGURE.search(page)
    if found is None:
        sys.exit("the report page has no curve")
    keys, attributes, drawing = found.groups()
    view = re.search(r'viewBox="0 0 (\d+) (\d+)"', attributes)
    if view is None:
        sys.exit("the curve of the report page has no size")
    width, height = map(int, view.groups())
    parts, x = [], 14
    for colour, stroke, name in KEY.findall(keys):
        style = f"stroke:{colour};stroke-width:2;stroke-dasharray:{DASHES[stroke]}"
        parts.append(f'<line x1="{x}" y1="-16" x2="{x + 22}" y2="-16" style="{style}"/>')
        parts.append(f'<text x="{x + 28}" y="-12">{name}</text>')
        x += 50 + 7 * len(name)
    box = f"-14 -36 {width + 28} {height + 48}"
    paper = f'<rect x="-14" y="-36" width="{width + 28}" height="{height + 48}" class="paper"/>'
    style = style_sheet() + "\n.paper{fill:var(--card)}svg{font-family:sans-serif}.cross,.spot{"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
        f'aria-label="loss against steps"><style>{style}display:none}}</style>'
        f"{paper}{''.join(parts)}{drawing}</svg>\n"
    )


if __name__ == "__main__":
    main()
