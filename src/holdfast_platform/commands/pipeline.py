"""`holdfast pipeline`: stages from data to an exported model, each run once for its inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.pipeline.file import read_pipeline, references
from holdfast_platform.pipeline.runner import PipelineRunner

File = Annotated[Path, typer.Argument(help="the pipeline file")]

app = make_app("Run the stages of a pipeline file; show and compile it.")


@app.command()
def run(
    file: File,
    only: Annotated[
        str | None, typer.Option(help="run this stage alone; earlier ones must be done")
    ] = None,
) -> int:
    """Run each stage whose inputs or recipe have changed, and continue what was cut off.

    The exit code is that of the stage that ended the pipeline. 75: it was asked to leave, and the
    same command continues. 4: max_hours or plan.ask_above_usd is reached.

    \b
    Example:
      holdfast pipeline run pipeline.yaml
      holdfast pipeline run pipeline.yaml --only pretrain
    """
    return PipelineRunner(read_pipeline(file), say).run(only)


@app.command()
def show(file: File, json: Json = False) -> None:
    """Show the stages, what each takes and makes, and why a stage would run.

    \b
    Example:
      holdfast pipeline show pipeline.yaml
    """
    rows = []
    for outlook in PipelineRunner(read_pipeline(file), say).outlooks():
        stage, record = outlook.stage, outlook.record
        results = dict((record.results if record and outlook.is_done else None) or {})
        rows.append(
            {
                "stage": stage.name,
                "kind": stage.kind,
                "takes": [f"{other}.{name}" for other, name in references(stage.values)],
                "makes": dict(stage.outputs),
                "is_done": outlook.is_done,
                "why": outlook.why,
                "key": outlook.key,
                "starts": record.starts if record else 0,
                "seconds": round(record.seconds, 1) if record else 0.0,
                "results": {name: vars(result) for name, result in results.items()},
            }
        )
    if json:
        print_json(rows)
        return
    print_table(
        [
            (
                *(row["stage"], row["kind"], ", ".join(row["takes"]) or "-"),
                *(", ".join(row["makes"]), row["starts"], row["seconds"]),
                row["why"] if row["is_done"] or not row["key"] else f"would run: {row['why']}",
            )
            for row in rows
        ],
        ("stage", "kind", "takes", "makes", "starts", "seconds", "state"),
    )
