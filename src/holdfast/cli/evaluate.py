"""`holdfast evaluate`: what a checkpoint gets in tasks."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import CheckpointStep, Json, LoraBase, RunArgument, refuse_beside
from holdfast.config.sections.evaluate import EvaluationTask
from holdfast.errors import ConfigError
from holdfast.export.texts import is_model_folder
from holdfast.show.output import check_target, print_json, say, write_text

app = make_app("Score a run or a model on tasks.")

_ROWS = (".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")


@app.command()
def evaluate(
    run: RunArgument,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="a file of rows, a task of evaluate.tasks by its name, or a task of "
            "lm-evaluation-harness; left out: all of evaluate.tasks",
        ),
    ] = None,
    step: CheckpointStep = None,
    limit: Annotated[int, typer.Option(min=0, help="first rows that are used; 0: all")] = 0,
    include: Annotated[
        Path | None, typer.Option(help="folder with more tasks of lm-evaluation-harness")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="worked examples before each row of such a task")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="a file for all items")] = None,
    base: LoraBase = None,
    json: Json = False,
) -> None:
    """Score the newest intact checkpoint of a run, or the folder of a model, on tasks.

    A file has one JSON object a line. Rows with prompt and answer are answered and compared. Rows
    with choices are scored by the likelihood of each choice, and rows with text by their loss.
    Results of a run are kept in its folder, and a second evaluation reads them.

    \b
    Example:
      holdfast evaluate runs/tuned --tasks held_out.jsonl
      holdfast evaluate runs/tuned --tasks held_out.jsonl --tasks facts.jsonl --step 500
      holdfast evaluate exported-model --tasks held_out.jsonl --to scores.json
      holdfast evaluate runs/tuned --tasks my_task --include harness-tasks
    """
    from holdfast.evaluation.harness import evaluate_harness, require_harness
    from holdfast.evaluation.model import open_model
    from holdfast.evaluation.tasks import evaluate_tasks, results_of

    if is_model_folder(run):
        refuse_beside("the folder of a model", {"--step": step is not None, "--base": base})
    files = [name for name in tasks or () if name.endswith(_ROWS)]
    names = [name for name in tasks or () if name not in files]
    own = [EvaluationTask(path=name) for name in files]
    known = _tasks_of_run(run)
    own += [task for task in known if task.label in names or not tasks]
    names = [name for name in names if name not in {task.label for task in known}]
    if not own and not names:
        raise ConfigError(
            "there is no task",
            where="--tasks",
            remedy="name a file of rows: --tasks held_out.jsonl, with lines such as "
            '{"prompt": "2+2=", "answer": "4"} or {"text": "..."}',
        )
    if names:
        require_harness()
    elif include is not None or shots is not None:
        given = {"--include": include, "--shots": shots is not None}
        refuse_beside("tasks that are files of rows", given)
    if to is not None:
        check_target(to, "--to", [Path(name) for name in files])
    if limit:
        own = [task.model_copy(update={"limit": limit}) for task in own]
    model = open_model(run, step, base, say)
    say(f"({model.source})")
    results = results_of(model)
    done = evaluate_tasks(model, own, say, results)
    if names:
        done += evaluate_harness(model, names, include, shots, limit, say, results)
    found = [result.to_json() for result in done]
    if to is not None:  # equal results give equal bytes
        rows = [{k: v for k, v in each.items() if k != "seconds"} for each in found]
        write_text(to, json_text.dumps(rows))
    if json:
        hidden = ("items", "replies")
        print_json([{k: v for k, v in each.items() if k not in hidden} for each in found])


def _tasks_of_run(run: Path) -> list[EvaluationTask]:
    """The tasks of a run's file, where a run is named."""
    if is_model_folder(run):
        return []
    from holdfast.launch.run.runs import open_run

    return list(open_run(run).config.evaluate.tasks)
