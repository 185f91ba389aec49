"""`holdfast track`: brings a run to trackers by hand, during the run or after it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.errors import UserError
from holdfast.launch.node.trackers import TRACKER_MODULE, tracker_spec
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.runs import open_run
from holdfast.report.alerts.webhook import PLACE as WEBHOOK
from holdfast.report.alerts.webhook import webhook_options
from holdfast.report.trackers.registry import (
    BUILT_IN,
    check_options,
    load_tracker,
    options_of,
    require_tracker,
    trackers_of,
)
from holdfast.report.trackers.tracker import Tracker
from holdfast.show.output import say
from holdfast.wire.child_command import module_command

CHECK_INTERVAL_S = 0.2
TRAINER_CHECK_INTERVAL_S = 2.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Seconds before a tracker that failed is started again: at first, and at most."""

app = make_app("Bring a run to trackers.")


@app.command()
def track(
    run: RunArgument,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="trackers, as csv,tensorboard; left out: those of the run file"),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE for the trackers that take it")
    ] = None,
) -> int:
    """Follow a run until its trainer has ended, and deliver every point to trackers.

    It continues where the last delivery stopped, by hand or by the run itself. A tracker that
    cannot be reached is tried until it can; Ctrl-C leaves, and nothing is lost. A tracker whose
    server refuses ends with the reason (exit code 2).

    \b
    Example:
      holdfast track runs/quickstart --to csv
      holdfast track run.yaml --to wandb --option mode=online --option project=mine
    """
    found = open_run(run)
    asked = [name.strip() for given in to or () for name in given.split(",")]
    own_names = [*trackers_of(found.config), *([WEBHOOK] if found.config.observe.webhook else [])]
    names = list(dict.fromkeys(filter(None, asked))) or own_names
    if not names:
        raise UserError(
            "the run has no trackers", where=str(run), remedy="name one, for example: --to csv"
        )
    given = _given_options(option or [])
    kinds = {name: _kind_of(name) for name in names}
    for option_name in given:
        if not any(_takes(kind, option_name) for kind in kinds.values()):
            check_options(names[0], kinds[names[0]], {option_name: ""}, _place(given, names[0]))
    children = []
    for name, kind in kinds.items():
        own = {key: value for key, value in given.items() if _takes(kind, key)}
        options = options_of(name, found.config.logging) | own
        if name == WEBHOOK:
            options = webhook_options(found.config) | own
        check_options(name, kind, options, _place(own, name))
        spec = tracker_spec(name, found.config, found.folder, options, "")
        children.append(_Child(name, spec.to_json_line()))
    watch = HolderWatch(found.folder)
    checked_at = float("-inf")
    is_over = False
    try:
        while not all(child.is_done for child in children):
            now = time.monotonic()
            if not is_over and now - checked_at >= TRAINER_CHECK_INTERVAL_S:
                is_over, checked_at = is_holder_gone(watch), now
            for child in children:
                child.check(now, is_over)
            time.sleep(CHECK_INTERVAL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for child in children:
            child.kill()
    return max(child.exit_code for child in children)


def _given_options(texts: list[str]) -> dict[str, str]:
    """Return the values of `--option`. Raises UserError."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UserError(
                "an option is written NAME=VALUE",
                where=f"--option {text}",
                remedy="for example --option mode=online",
            )
        if name in given:
            raise UserError(
                f"{name} is there twice", where=f"--option {text}", remedy="give it once"
            )
        given[name] = value
    return given


def _kind_of(name: str) -> type[Tracker]:
    """Return a tracker's class, of one that does not come with Holdfast the base class: it is
    imported in its own process alone. Raises ConfigError if there is none."""
    require_tracker(name, "--to")
    return load_tracker(name) if name in BUILT_IN else Tracker


def _takes(kind: type[Tracker], option: str) -> bool:
    return kind.option_names is None or option in kind.option_names


def _place(given: Mapping[str, str], name: str) -> Callable[[str], str]:
    """Return what says where an option of the tracker `name` stands."""
    return lambda key: f"--option {key}={given[key]}" if key in given else f"logging.{name}.{key}"


@dataclass
class _Child:
    name: str
    spec_line: bytes
    process: subprocess.Popen[bytes] | None = None
    retry_at: float = float("-inf")
    pause_s: float = FIRST_PAUSE_S
    is_done: bool = False
    exit_code: int = 0

    def check(self, now: float, is_over: bool) -> None:
        """Start the process if it is due, and tell it when nothing more comes."""
        if self.is_done:
            return
        if self.process is None:
            if now < self.retry_at:
                return
            self.process = subprocess.Popen(module_command(TRACKER_MODULE), stdin=subprocess.PIPE)
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(self.spec_line)
                self.process.stdin.flush()
            except BrokenPipeError:
                say(f"the tracker {self.name} ended at its start")
        assert self.process is not None
        if is_over and self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        code = self.process.poll()
        if code is None:
            return
        self.process = None
        if code in (0, UserError.exit_code):
            self.is_done, self.exit_code = True, code
            return
        self.retry_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
