"""`holdfast checkpoint`: the states that a run could resume from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.progress import StageProgress
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.restore.catalog import describe_checkpoint, list_commits
from holdfast.checkpoint.restore.inspect import (
    NEWEST_PATH,
    TensorDifference,
    compare_checkpoints,
    comparison_to_json,
    find_commit_key,
)
from holdfast.checkpoint.restore.inspect import commit_to_json as contents
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified
from holdfast.checkpoint.restore.verify import verify as problems_of
from holdfast.checkpoint.save import retention
from holdfast.cli import checkpoint_import
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.dispatch import expand_argument
from holdfast.cli.options import Json, RunArgument, named_argument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.config.loading.explain import format_value
from holdfast.config.loading.identity import config_differences
from holdfast.core.format.manifest import Commit
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_in_use
from holdfast.launch.run.runs import Run, open_run
from holdfast.launch.run.sealing import seal_copies
from holdfast.launch.start.regions import refuse_copy_elsewhere
from holdfast.layout import AXES
from holdfast.report.formatting import format_bytes, format_count
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.store.location import open_store, probe_store
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import RunStore

app = make_app("List, show, verify, compare, copy, keep, remove and import checkpoints.")

MAX_BOXES_NAMED = 3  # of a tensor, in the table of `show`; --json names them all


@app.command("list")
def list_(run: RunArgument, json: Json = False) -> None:
    """List the committed checkpoints, newest first.

    \b
    Example:
      holdfast checkpoint list runs/quickstart
    """
    found = open_run(run)
    rows, described, kept = [], [], retention.kept_steps(found.store)
    losses = retention.best_losses(found.store)
    for key in list_commits(found.store):
        try:
            row = describe_checkpoint(found.store, key)
        except HoldfastError as error:
            if key not in list_commits(found.store):
                continue  # a run at work removed it
            row = {"key": key, "problem": str(error)}
            rows.append(("?", "?", "?", str(error)))
        else:
            mark = " (kept)" if row["step"] in kept else ""
            row |= {"kept": True} if mark else {}
            if (loss := losses.get(row["step"])) is not None:
                mark = f" (kept, validation loss {loss:.4f})"
                row["validation_loss"] = loss
            size = format_bytes(row["bytes"])
            rows.append((f"{row['step']}{mark}", row["generation"], size, key))
        described.append(row)
    if json:
        print_json(described)
    elif rows:
        print_table(rows, head=("step", "membership (generation)", "size", "commit object"))
    else:
        say(f"{found.place} has no checkpoint")


@app.command()
def show(
    run: RunArgument,
    step: Annotated[str, typer.Argument(help="a number, or newest")] = "newest",
    json: Json = False,
) -> None:
    """Show one checkpoint: its layout, its tensors, who wrote what.

    Reads the commit object alone, so it is as quick for a terabyte. A part is written as the
    range of each dim: [0:128, 0:64] are 128 rows of 64.

    \b
    Example:
      holdfast checkpoint show runs/quickstart
      holdfast checkpoint show runs/quickstart 100 --json
    """
    found = open_run(run)
    with explain_read_errors(found.place):
        key = find_commit_key(found.store, step)
        data = found.store.get(key)
        shown = contents(Commit.from_bytes(data, key), len(data))
    if json:
        print_json(shown)
        return
    print_table(_facts(shown))
    print()
    print_table(
        [_tensor_row(name, tensor) for name, tensor in shown["tensors"].items()],
        head=("tensor", "dtype", "shape", "size", "written by"),
    )


def _facts(shown: dict[str, Any]) -> list[tuple[str, str]]:
    extents = {writer["extent_bytes"] for writer in shown["writers"]}
    return [
        ("step", str(shown["step"])),
        ("membership (generation)", str(shown["generation"])),
        ("layout", "; ".join(map(_kind, shown["layout"]))),
        ("size", f"{format_bytes(shown['bytes'])} in {format_count(len(shown['writers']))} blobs"),
        (
            "checksums",
            f"{format_count(shown['checksums'])}, one per "
            f"{' or '.join(map(format_bytes, extents))}",
        ),
        ("commit object", f"{shown['key']}, {format_bytes(shown['commit_object_bytes'])}"),
        ("configuration", shown["config_hash"]),
        ("dataset", shown["dataset_version"]),
        *((f"meta {name}", str(value)) for name, value in shown["meta"].items()),
    ]


def _kind(kind: dict[str, Any]) -> str:
    """One kind of replica in words."""
    degrees = [f"{axis} {kind[axis]}" for axis in AXES if kind[axis] > 1]
    replicas = f"{kind['replicas']} replica{'s' if kind['replicas'] > 1 else ''}"
    return f"{replicas} of {', '.join(degrees) or 'one rank'}"


def _tensor_row(name: str, tensor: dict[str, Any]) -> tuple[str, ...]:
    boxes = tensor["boxes"]
    named = ", ".join(_part(box, tensor["shape"]) for box in boxes[:MAX_BOXES_NAMED])
    more = f" and {len(boxes) - MAX_BOXES_NAMED} more" if len(boxes) > MAX_BOXES_NAMED else ""
    shape = "x".join(map(str, tensor["shape"])) or "scalar"
    return name, tensor["dtype"], shape, format_bytes(tensor["bytes"]), named + more


def _part(box: dict[str, Any], shape: list[int]) -> str:
    if box["lengths"] == shape:
        return f"rank {box['rank']}"
    spans = (f"{o}:{o + n}" for o, n in zip(box["offsets"], box["lengths"], strict=True))
    return f"rank {box['rank']} [{', '.join(spans)}]"


@app.command()
def verify(
    run: RunArgument,
    step: Annotated[
        str | None, typer.Argument(help="a number, or newest; none: all checkpoints")
    ] = None,
    json: Json = False,
) -> int:
    """Check every byte of a run's checkpoints, or of one. Exit code 1 if one differs.

    \b
    Example:
      holdfast checkpoint verify runs/quickstart
      holdfast checkpoint verify runs/quickstart newest
    """
    found = open_run(run)
    if step is None:
        keys = list_commits(found.store)
    else:
        with explain_read_errors(found.place):
            keys = [find_commit_key(found.store, step)]
    problems = {key: problems_of(found.store, key) for key in keys}
    # A run at work removes old ones while they are verified: nothing is wrong with those.
    there = set(list_commits(found.store))
    problems = {key: value for key, value in problems.items() if key in there or not value}
    if json:
        print_json([{"key": key, "problems": value} for key, value in problems.items()])
    else:
        for key, value in problems.items():
            print(f"{key}: {'whole' if not value else '; '.join(value)}")
        if not problems:
            say(f"{found.place} has no checkpoint")
    return 1 if any(problems.values()) else 0


# --- diff -----------------------------------------------------------------------------------
@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="RUN, RUN@STEP or RUN@newest")],
    second: Annotated[str, typer.Argument(help="the same")],
    brief: Annotated[bool, typer.Option("--brief", help="leave out the tensors' table")] = False,
    json: Json = False,
) -> int:
    """Compare two checkpoints, byte by byte. Exit code 1 if a tensor differs.

    They may be of one run or of two, in any layouts. Prints the tensors that only one of them has,
    those of another shape or dtype, and those with other bytes. For the last it prints how many
    elements differ, and the largest absolute difference. Without a step, a run's newest checkpoint
    is meant. A line names the keys of the run files that decide the computation and differ.

    \b
    Example:
      holdfast checkpoint diff runs/a@100 runs/a@200
      holdfast checkpoint diff runs/a runs/b
    """
    (a, run), (b, other) = _named(first), _named(second)
    here, there = explain_read_errors(run.place), explain_read_errors(other.place)
    with here, there, StageProgress() as progress:
        found = compare_checkpoints(a, b, partial(progress.show_bytes, "compared"))
    if json:
        print_json({"first": a.commit.key, "second": b.commit.key, **comparison_to_json(found)})
        return 1 if found.differences else 0
    keys = config_differences(run.resolved["config"], other.config)
    if named := [f"{d.key} {format_value(d.there)} and {format_value(d.here)}" for d in keys]:
        say(f"the run files differ: {', '.join(named)}")
    if found.differences:
        if not brief:
            print_table(
                [(d.name, _difference(d)) for d in found.differences.values()],
                head=("tensor", "difference"),
            )
        say(f"{len(found.differences)} tensors differ, {found.same_count} are the same")
    else:
        say(f"all {found.same_count} tensors are the same")
    return 1 if found.differences else 0


def _named(argument: str) -> tuple[Checkpoint, Run]:
    """The checkpoint that RUN@STEP names, and its run."""
    run, at, step = argument.rpartition("@")
    if not at or not (step == NEWEST_PATH or step.isdecimal()):
        run, step = argument, NEWEST_PATH  # an @ in a folder's name
    found = open_run(named_argument("run", run))
    with explain_read_errors(found.place):
        return Checkpoint.open(found.store, find_commit_key(found.store, step)), found


def _difference(d: TensorDifference) -> str:
    if d.kind != "bytes":
        return f"{d.kind}: {d.first} and {d.second}" if d.first else d.kind
    text = f"{format_count(d.elements)} of {format_count(d.total_elements)} elements"
    if d.max_abs is not None:
        text += f", by at most {d.max_abs:.6g}"
    return (
        f"{text}, {format_count(d.nonfinite_elements)} not finite" if d.nonfinite_elements else text
    )


# --- copy -----------------------------------------------------------------------------------
@app.command()
def copy(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="another run folder, made if it is not there; or s3://, gs://, az://"
        ),
    ],
    step: Annotated[str, typer.Argument(help="a number, or newest")] = "newest",
    json: Json = False,
) -> None:
    """Copy one checkpoint to another run folder or a bucket.

    Every byte is checked on the way. The commit object comes last, so a copy that is cut short is
    no checkpoint. The same command again copies only what is not intact there. A new folder gets
    the run's description too, so that every command works on it. 'holdfast train RUN.yaml
    folder=...' then resumes from it.

    \b
    Example:
      holdfast checkpoint copy runs/quickstart --to /backup/quickstart
      holdfast checkpoint copy runs/quickstart 100 --to s3://bucket/quickstart
    """
    found = open_run(run)
    refuse_copy_elsewhere(found.config.governance, to, "--to")
    target = _location(to, found)
    with explain_read_errors(found.place), StageProgress() as progress:
        key = find_commit_key(found.store, step)
        try:
            done = copy_checkpoint(
                found.store, key, target, partial(progress.show_bytes, "copied"), say=progress.say
            )
        except CheckpointError as error:
            if error.where != "the target":
                raise
            raise CheckpointError(error.message, where=to, remedy=error.remedy) from None
    if json:
        print_json(
            {
                "key": done.key,
                "step": done.step,
                "copied_bytes": done.copied_bytes,
                "there_bytes": done.present_bytes,
                "to": to,
            }
        )
    else:
        there = f", {format_bytes(done.present_bytes)} were there" if done.present_bytes else ""
        say(f"copied step {done.step} to {to}: {format_bytes(done.copied_bytes)}{there}")


def _location(to: str, run: Run) -> RunStore:
    """The run store that a location names. Raises CheckpointError for what cannot be one."""
    if "://" in to:
        store = open_store(to)
        seal_copies(run.folder, store, to)
        probe_store(store, to.partition("?")[0])
        return store
    folder = Path(expand_argument("to", to))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("this is not a folder", where=to, remedy="name another one")
    if folder.exists() and folder.samefile(run.folder):
        raise CheckpointError("this is the run itself", where=to, remedy="name another folder")
    refuse_in_use(folder, HolderWatch(folder, say))
    folder.mkdir(parents=True, exist_ok=True)
    seal_copies(run.folder, store_of_run(folder), folder)
    return store_of_run(folder)


# --- prune ----------------------------------------------------------------------------------
@app.command()
def prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="newest to keep; none: checkpoint.keep_last")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=0, help="keep each step that this divides; none: checkpoint.keep_every"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    json: Json = False,
) -> None:
    """Remove old checkpoints of a run that is not being trained.

    Kept are the newest ones, each step that --keep-every divides, and always the newest that is
    intact: every byte of it is read first. A broken one is removed when it is older than all that
    are kept. A run that is being trained applies its own retention, and is refused.

    \b
    Example:
      holdfast checkpoint prune runs/quickstart --keep-last 1 --dry-run
      holdfast checkpoint prune runs/quickstart --keep-last 2 --keep-every 1000
    """
    found = open_run(run)
    refuse_in_use(found.folder, HolderWatch(found.folder, say))
    rejected: dict[str, str] = {}
    with explain_read_errors(found.place):
        newest = find_newest_verified(found.store, rejected.__setitem__)
    for key, reason in rejected.items():
        say(f"passed over {key}: {reason}")
    verified = {newest.step} if newest else set()
    settings = found.config.checkpoint
    keep = retention.RetentionRules(
        settings.keep_last if keep_last is None else keep_last,
        settings.keep_every if keep_every is None else keep_every,
    )
    gone = retention.removable_commits(found.store, keep, verified, set(rejected))
    rows = [_row(found.store, key) for key in gone]
    if not dry_run:
        gone = retention.apply_retention(found.store, keep, verified, set(rejected))
    kept = [key for key in list_commits(found.store) if key not in gone]
    if json:
        print_json({"removed": gone, "kept": kept, "dry_run": dry_run})
        return
    if rows:
        print_table(rows, head=("step", "membership (generation)", "size", "commit object"))
    verb = "would be removed" if dry_run else "removed"
    say(f"{len(gone)} checkpoints {verb}, {len(kept)} kept")


@app.command()
def keep(
    checkpoint: Annotated[str, typer.Argument(metavar="RUN@STEP", help="the checkpoint")],
    release: Annotated[
        bool, typer.Option("--release", help="leave it to the rules of retention again")
    ] = False,
) -> None:
    """Keep one checkpoint, whatever the rules of retention say. The run may be training.

    \b
    Example:
      holdfast checkpoint keep runs/quickstart@200
    """
    found, run = _named(checkpoint)
    step = found.commit.step
    (retention.release_step if release else retention.keep_step)(run.store, step)
    say(f"step {step} is {'left to checkpoint.keep_last again' if release else 'kept'}")


def _row(store: RunStore, key: str) -> tuple[str, ...]:
    try:
        found = describe_checkpoint(store, key)
    except HoldfastError:
        return "?", "?", "?", key
    return str(found["step"]), str(found["generation"]), format_bytes(found["bytes"]), key


app.command("import")(checkpoint_import.import_)
