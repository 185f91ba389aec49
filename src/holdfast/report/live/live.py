"""The view of a live run: a picture on a terminal, plain lines anywhere else.

    with View(total_steps=700) as view:
        view.replay(journal.read(store))
        Agent(..., observers=[view.observe], say=view.say).run()

`observe` updates a few numbers and returns. Drawing happens on another thread, four times a
second at most, so a slow terminal slows nothing but itself.
"""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from holdfast.events import Evaluated, Record, StepDone
from holdfast.report.formatting import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_percent,
    format_plural,
    format_si,
)
from holdfast.report.history.progress import ProgressLine, RunProgress
from holdfast.report.ledger.incidents import describe_rung
from holdfast.report.ledger.ordering import order_records
from holdfast.report.live.background import BackgroundQueue
from holdfast.report.live.braille import braille, scale_top, split_bar

_MOODS = {"good": "green", "bad": "bold red", "plain": "default"}
_WORKERS = {
    "training": ("●", "green"),
    "ready": ("●", "cyan"),
    "starting": ("○", "yellow"),
    "held": ("◐", "yellow"),
    "lost": ("✗", "bold red"),
}
_STATES = {
    "training": "green",
    "finished": "green",
    "failed": "bold red",
    "recovering": "red",
    "starting": "yellow",
    "stopped": "yellow",
    "waiting for a majority": "bold red",
}
_REDRAWS_PER_S = 4
_MAX_QUEUED_LINES = 1000  # lines that may wait for a slow reader; older ones are dropped


class LiveView:
    """An observer of records and a context manager; see the module.

    every_seconds: of plain lines about steps; events always have a line of their own.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        every_seconds: float = 5.0,
        now: Callable[[], float] = time.monotonic,
        imported_from: str = "",
        first_weights: str = "initial weights",
    ) -> None:
        self.progress = RunProgress(
            total_steps, imported_from=imported_from, first_weights=first_weights
        )
        self._console = console or Console()
        self._every = every_seconds
        self._now = now
        self._next_line = now()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._printer: BackgroundQueue[str] = BackgroundQueue(
            "view", self._print, _MAX_QUEUED_LINES
        )

    def __enter__(self) -> LiveView:
        self._printer.start()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=_REDRAWS_PER_S,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._printer.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def observe(self, record: Record) -> None:
        with self._lock:
            happenings = self.progress.observe(record)
        if self._live is None:
            self._plain(record, happenings)

    def replay(self, records: Iterable[Record]) -> None:
        """Take the records of older sessions, to complete the curve, without a line about them."""
        with self._lock:
            for record in order_records(records):
                self.progress.observe(record)

    def say(self, line: str) -> None:
        """Print a line above the picture, or among the plain lines."""
        self._printer.put(line)

    # --- plain lines ------------------------------------------------------------------------
    def _plain(self, record: Record, happenings: Iterable[ProgressLine]) -> None:
        event = record.event
        for happening in happenings:
            self._printer.put(f"[{format_clock(happening.at)}] {happening.text}")
        if isinstance(event, StepDone):
            last = event.step >= self.progress.total_steps
            if last or event.step == 1 or self._now() >= self._next_line:
                self._next_line = self._now() + self._every
                self._printer.put(step_line(self.progress))

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    # --- the picture ------------------------------------------------------------------------
    def _render(self) -> RenderableType:
        with self._lock:
            width, height = self._console.width, self._console.height
            return picture(self.progress, width, height)


def step_line(progress: RunProgress) -> str:
    """The plain line about the newest step."""
    parts = [
        f"step {format_count(progress.step)}/{format_count(progress.total_steps)}",
        f"loss {progress.loss:.4f}",
        *(f"{name} {value:.3f}" for name, value in headline_metrics(progress.metrics)),
        f"{format_si(progress.tokens_per_second)} {progress.unit}/s",
    ]
    if progress.eta_s is not None and progress.step < progress.total_steps:
        parts.append(f"{format_duration(progress.eta_s)} left")
    return "  ".join(parts)


_HEADLINES = ("reward", "rewards/accuracies", "rewards/margins", "kl", "entropy")
_MAX_HEADLINES = 2


def headline_metrics(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the metrics of an objective that a line about a step has room for."""
    known = [(name, metrics[name]) for name in _HEADLINES if name in metrics]
    return known[:_MAX_HEADLINES]


def picture(progress: RunProgress, width: int, height: int) -> RenderableType:
    """The full view for a terminal of that size, one line lower than it; low ones get less."""
    inner = max(20, min(width, 110) - 4)
    status = [_workers(progress, inner), _saved(progress, inner)]
    status += [_nodes(progress, inner)] if len(progress.nodes) > 1 else []
    top: list[RenderableType] = [_bar_line(progress, inner), *_numbers(progress, inner)]
    rest = height - 3 - len(top)  # lines; two of the frame and one below it
    status = status[: max(0, rest - 1)]
    rest -= len(status)
    blank = [""] if rest >= 6 else []
    rest -= 2 * len(blank)
    curve = min(9, rest // 3) if rest >= 8 and len(progress.curve) > 1 else 0
    parts = [*top, *blank]
    parts += [*_curve(progress, inner, curve), ""] if curve else []
    parts += status
    events = _events(progress, inner, min(12, rest - curve - (curve > 0)))
    parts += [*blank, *events] if events else []
    title = Text.assemble(
        (progress.run or "holdfast", "bold"),
        "  ",
        (progress.state, _STATES.get(progress.state, "default")),
        f"  {format_plural(len(progress.workers), 'worker')} (generation {progress.generation})"
        if width >= 60 and progress.generation
        else "",
    )
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        border_style="dim",
        width=min(width, 110),
        padding=(0, 1),
    )


def _events(progress: RunProgress, width: int, lines: int) -> list[Text]:
    """Return the newest events on at most so many lines, each with its cause on lines below."""
    out: list[Text] = []
    for event in reversed(progress.lines):
        free = lines - len(out)
        text = textwrap.wrap(event.text, width - 9, max_lines=min(4, free), placeholder=" …")
        if not free or (out and len(text) == free and text[-1].endswith("…")):
            break
        clocks = [f"{format_clock(event.at):>7}", *[" " * 7] * (len(text) - 1)]
        out[:0] = [
            _line((f"{clock}  ", "dim"), (line, _MOODS[event.mood]), width=width)
            for clock, line in zip(clocks, text, strict=True)
        ]
    return out


def _line(*pieces: tuple[str, str] | str, width: int) -> Text:
    text = Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


def _bar_line(progress: RunProgress, width: int) -> Text:
    ratio = progress.step / progress.total_steps if progress.total_steps else 0.0
    left = f"step {format_count(progress.step)}/{format_count(progress.total_steps)}  "
    right = f"  {format_percent(ratio)}"
    if progress.eta_s is not None and not progress.is_over and width >= 48:
        right += f"  {format_duration(progress.eta_s)} left"
    done, rest = split_bar(ratio, max(4, width - len(left) - len(right)))
    return _line(left, (done, "green"), (rest, "dim"), right, width=width)


def _numbers(progress: RunProgress, width: int) -> list[Text]:
    """Return the figures on one line, or on two of a narrow terminal."""
    figures: list[tuple[str, str]] = []
    found: Evaluated | None = progress.validation
    if progress.curve:
        figures.append(("loss", f"{progress.loss:.3f}"))
    figures += [(name, f"{value:.3f}") for name, value in headline_metrics(progress.metrics)]
    if found is not None:
        is_text = found.bits_per_byte is not None
        name = "bits/byte" if is_text else "validation"
        figures.append((name, f"{found.bits_per_byte if is_text else found.loss:.3f}"))
    if progress.tokens_per_second:
        figures.append((f"{progress.unit}/s", format_si(progress.tokens_per_second)))
    if progress.curve:
        figures.append(("goodput", format_percent(progress.ledger.goodput_running)))
    lines = [Text()]
    for name, value in figures:
        if len(lines[-1]) + len(name) + len(value) + 1 > width:
            lines.append(Text())
        lines[-1].append(f"{name} ", "dim").append(f"{value}   ")
    return lines[:2]


def _curve(progress: RunProgress, width: int, height: int) -> list[Text]:
    """The loss so far, with the top and the bottom of its scale next to it."""
    losses = [loss for _, loss in progress.curve]
    top = scale_top(losses)
    rows = braille(losses, max(8, width - 8), height, top)
    marks = {0: f"{top:7.3f}", height - 1: f"{min(losses):7.3f}"}
    return [
        _line((marks.get(row, " " * 7), "dim"), " ", (cells, "cyan"), width=width)
        for row, cells in enumerate(rows)
    ]


def _workers(progress: RunProgress, width: int) -> Text:
    pieces: list[tuple[str, str] | str] = [("workers  ", "dim")]
    wide = width >= 14 * len(progress.workers) + 9
    for rank, state in sorted(progress.workers.items()):
        sign, style = _WORKERS[state]
        pieces += [(sign, style), f" {rank} {state}   " if wide else " "]
    if not wide:
        alive = sum(state != "lost" for state in progress.workers.values())
        pieces.append(f" {format_plural(alive, 'worker')}")
    return _line(*pieces, width=width)


def _nodes(progress: RunProgress, width: int) -> Text:
    """Show present and past members, spares, and how the newest change was survived."""
    pieces: list[tuple[str, str] | str] = [("nodes    ", "dim")]
    is_wide = width >= sum(len(name) + 5 for name in progress.nodes) + 6 * len(progress.spares) + 9
    if not is_wide:
        pieces.append((f"● {format_plural(sum(progress.nodes.values()), 'node')}   ", "green"))
    for name, there in progress.nodes.items():
        if is_wide and there:
            pieces.append((f"● {name}   ", "green"))
        elif name in progress.spares:
            pieces.append((f"○ {name} spare   ", "yellow"))
        elif not there:
            pieces.append((f"✗ {name}   ", "dim red"))
    if progress.rung >= 0:
        pieces.append((describe_rung(progress.rung), "dim"))
    return _line(*pieces, width=width)


def _saved(progress: RunProgress, width: int) -> Text:
    if progress.checkpoint is None:
        return _line(("saved    ", "dim"), "nothing yet", width=width)
    event, at = progress.checkpoint
    ago = format_duration(max(0.0, progress.ledger.running - at))
    return _line(
        ("saved    ", "dim"),
        f"step {format_count(event.step)}, {ago} ago, {format_bytes(event.bytes)}",
        width=width,
    )


def watch_run(batches: Iterable[list[Record]], view: LiveView) -> None:
    """Show a run that another process trains: `watch(journal.follow_journal(store), view)`.

    Returns when the run has ended and everything that is written of it was shown.
    """
    for batch in batches:
        for record in order_records(batch):
            view.observe(record)
        if view.progress.is_over:
            return
