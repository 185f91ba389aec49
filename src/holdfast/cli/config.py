"""`holdfast config`: what a run file says, and what it may say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.dispatch import expand_argument
from holdfast.cli.options import Overrides
from holdfast.config.loading.explain import format_value as shown
from holdfast.config.loading.fields import leaves
from holdfast.config.loading.identity import config_hash
from holdfast.config.loading.load import load_config
from holdfast.config.loading.reference import json_schema, markdown
from holdfast.show.output import print_json, print_table

app = make_app("Show a run file as it is understood, and what it may contain.")


@app.command()
def show(
    run_file: Annotated[str | None, typer.Argument(help="the run file; none: defaults")] = None,
    overrides: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="say where each value is from")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON, origins included")] = False,
) -> None:
    """Print every value of a run file, and with --origin its origin.

    Defaults, the preset and overrides are filled in.

    \b
    Example:
      holdfast config show run.yaml --origin
      holdfast config show run.yaml train.steps=200 --json
    """
    given, path = list(overrides or []), None
    if run_file is not None and "=" in run_file and not Path(run_file).exists():
        given.insert(0, run_file)  # only overrides: the defaults with these
    elif run_file is not None:
        path = Path(expand_argument("run file", run_file))
    loaded = load_config(path, given)
    if json:
        print_json(loaded.to_json() | {"hash": config_hash(loaded.config)})
        return
    rows = []
    for key, value in leaves(loaded.config.model_dump(mode="json")):
        cells = [key, shown(value)]
        rows.append([*cells, str(loaded.origins[key])] if origin else cells)
    print_table(rows)


@app.command()
def schema(
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="the reference page (docs/reference/run-file.md)")
    ] = False,
) -> None:
    """Print the run file's JSON schema, or its reference page.

    \b
    Example:
      holdfast config schema > run.schema.json
      holdfast config schema --markdown
    """
    if as_markdown:
        print(markdown(), end="", flush=True)
    else:
        print_json(json_schema())
