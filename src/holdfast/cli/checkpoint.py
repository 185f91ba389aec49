"""`holdfast checkpoint`: what a run could go on from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, print_table, say
from holdfast.cli.runs import open_run
from holdfast.errors import DataError, OutOfSpaceError, UserError
from holdfast.report.numbers import size

if TYPE_CHECKING:
    from holdfast.data.dataset import Dataset

app = make_app("List, verify and import checkpoints.")

RunArgument = Annotated[
    Path, typer.Argument(help="run folder, or the run file it was started with")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("list")
def list_(run: RunArgument, json: Json = False) -> None:
    """List the committed checkpoints, newest first.

    \b
    Example:
      holdfast checkpoint list runs/quickstart
    """
    from holdfast.checkpoint.restore import describe, listing
    from holdfast.errors import HoldfastError

    found = open_run(run)
    rows, described = [], []
    for key in listing(found.store):
        try:
            row = describe(found.store, key)
        except HoldfastError as error:
            if key not in listing(found.store):
                continue  # a run that goes on removed it
            row = {"key": key, "problem": str(error)}
            rows.append(("?", "?", "?", str(error)))
        else:
            rows.append((row["step"], row["generation"], size(row["bytes"]), key))
        described.append(row)
    if json:
        print_json(described)
    elif rows:
        print_table(rows, head=("step", "generation", "size", "commit object"))
    else:
        say(f"{found.folder} has no checkpoint")


@app.command()
def verify(run: RunArgument, json: Json = False) -> int:
    """Check every byte of a run's checkpoints. Exit code 1 if one differs.

    \b
    Example:
      holdfast checkpoint verify runs/quickstart
    """
    from holdfast.checkpoint.restore import listing
    from holdfast.checkpoint.restore import verify as problems_of

    found = open_run(run)
    problems = {key: problems_of(found.store, key) for key in listing(found.store)}
    # A run that goes on removes old ones while they are verified: nothing is wrong with those.
    there = set(listing(found.store))
    problems = {key: value for key, value in problems.items() if key in there or not value}
    if json:
        print_json([{"key": key, "problems": value} for key, value in problems.items()])
    else:
        for key, value in problems.items():
            print(f"{key}: {'whole' if not value else '; '.join(value)}")
        if not problems:
            say(f"{found.folder} has no checkpoint")
    return 1 if any(problems.values()) else 0


@app.command("import")
def import_(
    run_file: Annotated[Path, typer.Argument(help="the run file of a run that has not begun")],
    source: Annotated[Path, typer.Option("--from", help="folder as transformers writes it")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    json: Json = False,
) -> None:
    """Begin a run from the weights of a Hugging Face folder.

    The folder's weights become the state after step 0; 'holdfast train' then starts from it.
    The dataset must have been tokenised with the folder's tokenizer.

    \b
    Example:
      holdfast checkpoint import run.yaml --from Llama-3.2-1B \\
          data.tokenizer.path=Llama-3.2-1B/tokenizer.json model.preset=llama3.2-1b
    """
    from holdfast.checkpoint.importing import import_checkpoint
    from holdfast.checkpoint.restore import describe as numbers_of
    from holdfast.cli.run_folder import describe, refuse_in_use, refuse_other, undescribe
    from holdfast.cli.runs import read_resolved
    from holdfast.cli.train import plan, ready_dataset, with_vocabulary
    from holdfast.config.identity import config_hash
    from holdfast.config.load import load
    from holdfast.plan.hardware import this_machine
    from holdfast.wire.runstore import FolderStore

    machine = this_machine()
    loaded = plan(load(run_file, overrides or []), machine)
    folder = Path(loaded.config.run_folder)
    refuse_in_use(folder)
    dataset = ready_dataset(loaded)
    refuse_other_tokenizer(source, dataset)
    loaded = with_vocabulary(loaded, dataset.vocab_size)
    refuse_other(folder, loaded, dataset.version)
    new = read_resolved(folder) is None
    describe(folder, loaded, machine, dataset.folder, dataset.version)
    config = loaded.config
    store = FolderStore(folder)
    try:
        commit = import_checkpoint(
            store, source, config.model, config.train.precision,
            config_hash=config_hash(config), dataset_version=dataset.version,
        )  # fmt: skip
    except UserError as error:
        if new and not isinstance(error, OutOfSpaceError):
            undescribe(folder)  # so that the remedy may change the configuration
        raise
    row = numbers_of(store, commit.key)
    if json:
        print_json(row | {"folder": str(folder)})
    else:
        say(f"imported {size(row['bytes'])} into {folder}; train it: holdfast train {run_file}")


def refuse_other_tokenizer(source: Path, dataset: Dataset) -> None:
    """Raises DataError when a model's folder has a tokenizer, and it is not the dataset's: every
    token would mean something else than the weights have learnt."""
    from holdfast.data.vocabulary import differences

    theirs = source / "tokenizer.json"
    if theirs.is_file() and (difference := differences(theirs, dataset.tokenizer_path)):
        raise DataError(
            f"the dataset in {dataset.folder} was tokenised with another tokenizer: {difference}",
            where=str(theirs),
            remedy=f"add data.tokenizer.path={theirs} and name another data.folder",
        )
