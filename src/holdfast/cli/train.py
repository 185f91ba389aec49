"""`holdfast train`: from a run file to a trained model."""

from __future__ import annotations

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Fresh, JournalJson, Overrides, RunFile, Yes
from holdfast.show.output import print_line

app = make_app("Start or resume the run that a run file describes.")


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    yes: Yes = False,
    json: JournalJson = False,
) -> int:
    """Start or resume the run described by a run file.

    The dataset is prepared first if it is not there. Ctrl-C saves and leaves (exit code 0);
    a second Ctrl-C leaves at once.

    \b
    Example:
      holdfast train run.yaml
      holdfast train run.yaml train.steps=200 layout.workers=4
      holdfast train run.yaml --fresh
    """
    from holdfast.api.start import start

    ended = start(run_file, overrides or (), fresh=fresh, json=json, yes=yes)
    if json and ended.last_step is not None:
        print_line({"finished": True, "step": ended.last_step, "folder": str(ended.folder)})
    return ended.exit_code
