"""`holdfast pipeline`: stages from data to an exported model, each run once for its inputs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, refuse_beside
from holdfast.errors import UserError, use_one_of
from holdfast.show.output import print_json, print_table, say, write_text
from holdfast_platform.pipeline.compile import TARGETS, Target
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
    """Run the stages whose inputs or recipe have changed.

    What was cut off continues.

    The exit code is that of the stage that ended the pipeline. 75: it was asked to leave, and the
    same command continues. 4: max_hours or plan.ask_above_usd is reached.

    \b
    Example:
      holdfast pipeline run pipeline.yaml
      holdfast pipeline run pipeline.yaml --only pretrain
    """
    return PipelineRunner(read_pipeline(file), say).run(only)


@app.command("compile")
def compile_file(
    file: File,
    to: Annotated[str, typer.Option(help="kubeflow, airflow or github")],
    out: Annotated[Path | None, typer.Option(help="the file to write; none: print it")] = None,
    image: Annotated[str, typer.Option(help="container image with Holdfast")] = "",
    claim: Annotated[
        str, typer.Option(help="kubeflow: NAME:PATH, a PersistentVolumeClaim and its mount")
    ] = "",
    at: Annotated[
        str, typer.Option(help="path of the pipeline file for the steps; none: as it lies here")
    ] = "",
) -> None:
    """Write the pipeline for Kubeflow, Airflow or GitHub.

    The files suit Kubeflow Pipelines, Airflow 3 and GitHub Actions.

    Each stage becomes a step that runs that stage alone. A retry of a step continues it.

    \b
    Example:
      holdfast pipeline compile pipeline.yaml --to airflow --out dags/tiny.py
      holdfast pipeline compile pipeline.yaml --to kubeflow --image IMAGE --claim runs:/data \\
        --at /data/pipeline.yaml --out pipeline-kfp.yaml
    """
    pipeline = read_pipeline(file)
    if to not in TARGETS:
        raise UserError(f"--to is {to!r}", where="command line", remedy=use_one_of(TARGETS, to))
    if to == "kubeflow" and not image:
        raise UserError("a step needs --image", where="command line", remedy="add --image IMAGE")
    refuse_beside(
        f"--to {to}", {"--image": to == "airflow" and image, "--claim": to != "kubeflow" and claim}
    )
    name, colon, path = claim.partition(":")
    if claim and not (name and colon and path.startswith("/")):
        raise UserError(f"--claim is {claim!r}", where="command line", remedy="write NAME:/PATH")
    place = str(file if to == "github" else file.absolute())
    text = TARGETS[to](pipeline, Target(at or place, image, name, path))
    if out is None:
        print(text, end="", flush=True)
    else:
        write_text(out, text)


@app.command()
def show(file: File, json: Json = False) -> None:
    """Show the stages, and why a stage would run.

    \b
    Example:
      holdfast pipeline show pipeline.yaml
    """
    rows = []
    for outlook in PipelineRunner(read_pipeline(file), say).outlooks():
        stage, record = outlook.stage, outlook.record
        results = (record.results if record and outlook.is_done else None) or {}
        row: dict[str, Any] = {
            "stage": stage.name,
            "kind": stage.kind,
            "takes": [f"{other}.{name}" for other, name in references(dict(stage.values))],
            "makes": dict(stage.outputs),
            "is_done": outlook.is_done,
            "why": outlook.why,
            "key": outlook.key,
            "starts": record.starts if record else 0,
            "seconds": round(record.seconds, 1) if record else 0.0,
            "results": {name: asdict(result) for name, result in results.items()},
        }
        rows.append(row)
    if json:
        print_json(rows)
        return
    head = ("stage", "kind", "takes", "makes", "starts", "seconds", "why")
    cells = [
        {**row, "takes": ", ".join(row["takes"]) or "-", "makes": ", ".join(row["makes"])}
        | ({} if row["is_done"] or not row["key"] else {"why": f"would run: {row['why']}"})
        for row in rows
    ]
    print_table([[row[name] for name in head] for row in cells], (*head[:-1], "state"))
