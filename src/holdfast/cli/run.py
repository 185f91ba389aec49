"""`holdfast run`: a run whose loop is the user's own script."""

from __future__ import annotations

import json as json_format
import re
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Fresh, JournalJson
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.errors import ConfigError
from holdfast.show.output import print_line

app = make_app("Start or resume a run whose loop is your own script.")


@app.command()
def run(
    script: Annotated[Path, typer.Argument(help="the script, a Python file")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="after --: what the script finds in sys.argv")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="worker processes; 0: as for this machine")
    ] = 0,
    folder: Annotated[
        str, typer.Option("--folder", help="the run folder  [default: runs/SCRIPT]")
    ] = "",
    config: Annotated[Path | None, typer.Option("--config", help="a run file for all else")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of a run file; may be repeated")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="one process with your terminal, and no run folder")
    ] = False,
    fresh: Fresh = False,
    json: JournalJson = False,
) -> int:
    """Start or resume a run whose loop is your own script.

    The script keeps a module and an optimizer, and computes the batches that it is dealt:

    \b
      run = holdfast.run()
      run.keep(model, optimizer)
      for step in run.steps(300, batch_size=64, microbatch_size=16):
          for batch in step.batches(dataset):
              loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
              step.backward(loss, weight=len(batch["y"]))
          step.apply()

    The same command again resumes the run. Ctrl-C saves and leaves (exit code 0). With --debug,
    breakpoint() and pdb work, and nothing is saved.

    \b
    Example:
      holdfast run train.py --workers 2 -- --hidden 128
      holdfast run train.py --debug -- --hidden 128
      holdfast run train.py --workers 4 --set checkpoint.every_steps=50 -- --hidden 128
    """
    from holdfast.api.start import start

    if not script.is_file():
        raise ConfigError("there is no such script", where=str(script), remedy="name a Python file")
    if debug:
        from holdfast.api.alone import debug as run_alone

        if workers > 1 or folder or fresh or json:
            raise ConfigError(
                "a script under --debug is one process without a run folder",
                where="--debug",
                remedy="leave out --workers, --folder, --fresh and --json",
            )
        run_alone(script, arguments or [], config, settings or [])
        return 0
    name = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("-.") or "run"
    args = json_format.dumps({"script": script.name, "arguments": arguments or []})
    given = [
        f"name={name}",
        f"task.name={SCRIPT_TASK}",
        f"task.folder={script.resolve().parent}",
        f"task.args={args}",
        *(settings or []),
    ]
    if workers:
        given.append(f"layout.workers={workers}")
    if folder:
        given.append(f"folder={folder}")
    ended = start(config, given, fresh=fresh, json=json)
    if json and ended.last_step is not None:
        print_line({"finished": True, "step": ended.last_step, "folder": str(ended.folder)})
    return ended.exit_code
