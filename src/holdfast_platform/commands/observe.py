"""`holdfast observe`: what Prometheus, Alertmanager and Grafana need for a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument, refuse_beside
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.observe import FROM_ENVIRONMENT
from holdfast.errors import ConfigError, RunFolderError
from holdfast.events import StepDone
from holdfast.launch.run.runs import Run, open_run, run_folder_of
from holdfast.report.live.background import FOLLOWER_NICENESS
from holdfast.show.output import say
from holdfast.wire.journal import read_journal

app = make_app("Write rules, routes and boards for Prometheus, and serve a run's metrics.")

_STEPS = 200  # newest ones, whose median is a usual step
Webhook = typer.Option(metavar="<address>", help="webhook that gets alerts of this severity")


@app.command()
def observe(
    run: RunArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="<folder>", help="folder for the files")
    ] = None,
    serve: Annotated[
        str, typer.Option(metavar="<host:port>", help="serve the run's metrics and its agents")
    ] = "",
    page: Annotated[str, Webhook] = "",
    ticket: Annotated[str, Webhook] = "",
    chat: Annotated[str, Webhook] = "",
    observer: Annotated[
        str, typer.Option(metavar="<host:port>", help="where --serve will answer")
    ] = "127.0.0.1:9401",
    alertmanager: Annotated[
        str, typer.Option(metavar="<host:port>", help="Alertmanager's address")
    ] = "127.0.0.1:9093",
    runbooks: Annotated[
        str, typer.Option(metavar="<address>", help="what the addresses of runbooks begin with")
    ] = "docs",
) -> None:
    """Write the files of Prometheus, Alertmanager and Grafana for a run, or serve its metrics.

    With --to, the folder gets prometheus.yml, rules.yml, alertmanager.yml, three boards and a
    Compose file. Rules of objectives come from the key observe.objectives. A rule that cannot fire
    for its target is not written, and a line says so.

    With --serve, this process follows the run's journal. It answers /metrics, and /targets with the
    agents' addresses. Prometheus needs it to tell a run that has ended from one that is lost.

    \b
    Example:
      holdfast observe run.yaml --to observe --page https://pager.example/hook
      holdfast observe runs/my-run --serve 127.0.0.1:9401
    """
    if (to is None) == (not serve):
        raise ConfigError(
            "one of --to and --serve is needed",
            where="command line",
            remedy="use --to FOLDER, or --serve 127.0.0.1:9401",
        )
    if serve:
        given = {"--page": page, "--ticket": ticket, "--chat": chat}
        refuse_beside("--serve", given)
        _serve(open_run(run), serve)
        return
    assert to is not None
    from holdfast_platform.observe.folder import observe_files, write_files

    _refuse_wrong_webhooks({"--page": page, "--ticket": ticket, "--chat": chat})
    for option, address in (("--observer", observer), ("--alertmanager", alertmanager)):
        _split_address(option, address)
    config, place, step_s = _config_of(run)
    usual = "" if config.observe.webhook == FROM_ENVIRONMENT else config.observe.webhook
    receivers = {"page": page or usual, "ticket": ticket or usual, "chat": chat or usual}
    files, reasons = observe_files(
        config,
        place,
        receivers=receivers,  # type: ignore[arg-type]
        observer=observer,
        alertmanager=alertmanager,
        runbooks=runbooks.rstrip("/"),
        step_s=step_s,
    )
    try:
        write_files(files, to)
    except OSError as error:
        raise RunFolderError(
            f"the folder cannot be written ({error.strerror})",
            where=str(to),
            remedy="name another one with --to",
        ) from None
    for reason in reasons:
        say(f"not written: {reason}")
    for severity, address in receivers.items():
        if not address:
            say(f"alerts of severity {severity} go nowhere: name an address with --{severity}")
    say(f"wrote {len(files)} files to {to}; now start: holdfast observe {place} --serve {observer}")


def _refuse_wrong_webhooks(addresses: Mapping[str, str]) -> None:
    """addresses: by option; "" for none. Raises ConfigError."""
    for option, address in addresses.items():
        if address and not re.match(r"https?://[^/]", address):
            raise ConfigError(
                f"{address!r} is no address of a webhook",
                where=option,
                remedy="use https://HOST/PATH",
            )


def _split_address(option: str, address: str) -> tuple[str, int]:
    """Return host and port. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[^/\s]+:\d{1,5}", address) or int(port) > 65535:
        raise ConfigError(
            f"{address!r} is no address", where=option, remedy="use HOST:PORT: 127.0.0.1:9401"
        )
    return host, int(port)


def _config_of(argument: Path) -> tuple[RunConfig, str, float]:
    """Return the configuration that an argument names, its run's place, and the seconds of a usual
    step; 0 for a run that has not begun. Raises UserError."""
    try:
        found = open_run(argument)
    except RunFolderError:
        if not argument.is_file():
            raise
        config = load_config(argument).config
        return config, str(run_folder_of(config).absolute()), 0.0
    steps = [r.event.seconds for r in read_journal(found.store) if isinstance(r.event, StepDone)]
    place = found.place if "://" in found.place else str(Path(found.place).absolute())
    return found.config, place, median(steps[-_STEPS:]) if steps else 0.0


def _serve(run: Run, address: str) -> None:
    from holdfast_platform.observe.observer import Observer

    host, port = _split_address("--serve", address)
    os.nice(FOLLOWER_NICENESS)
    say(f"serves {run.config.name} on http://{address}/metrics and /targets; Ctrl-C ends it")
    try:
        Observer(run).serve(host, port)
    except KeyboardInterrupt:
        return
