"""`holdfast checkpoint diff`, `copy` and `prune`: compare, copy and remove checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.api.progress import StageProgress
from holdfast.cli.dispatch import expand_argument
from holdfast.cli.options import RunArgument, named_argument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.errors import CheckpointError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import open_run
from holdfast.report.formatting import format_bytes, format_count
from holdfast.show.output import print_json, print_table, say

if TYPE_CHECKING:
    from holdfast.checkpoint.restore.inspect import TensorDifference
    from holdfast.checkpoint.restore.reader import Checkpoint
    from holdfast.wire.store.run_store import RunStore

Json = Annotated[bool, typer.Option("--json", help="print JSON")]


# --- diff -----------------------------------------------------------------------------------
def diff(
    first: Annotated[str, typer.Argument(help="RUN, RUN@STEP or RUN@newest")],
    second: Annotated[str, typer.Argument(help="the same")],
    json: Json = False,
) -> int:
    """Compare two checkpoints, byte by byte. Exit code 1 if a tensor differs.

    They may be of one run or of two, in any layouts. Prints the tensors that only one of them has,
    those of another shape or dtype, and those with other bytes. For the last it prints how many
    elements differ, and the largest absolute difference. Without a step, a run's newest checkpoint
    is meant.

    \b
    Example:
      holdfast checkpoint diff runs/a@100 runs/a@200
      holdfast checkpoint diff runs/a runs/b
    """
    from holdfast.checkpoint.restore.inspect import compare_checkpoints, comparison_to_json

    (a, where), (b, other) = _named(first), _named(second)
    with explain_read_errors(where), explain_read_errors(other), StageProgress() as progress:
        found = compare_checkpoints(a, b, partial(progress.show_bytes, "compared"))
    if json:
        print_json({"first": a.commit.key, "second": b.commit.key, **comparison_to_json(found)})
    elif found.differences:
        print_table(
            [(d.name, _difference(d)) for d in found.differences.values()],
            head=("tensor", "difference"),
        )
        say(f"{len(found.differences)} tensors differ, {found.same_count} are the same")
    else:
        say(f"all {found.same_count} tensors are the same")
    return 1 if found.differences else 0


def _named(argument: str) -> tuple[Checkpoint, Path]:
    """The checkpoint that RUN@STEP names, and its run folder."""
    from holdfast.checkpoint.restore.inspect import NEWEST_PATH, find_commit_key
    from holdfast.checkpoint.restore.reader import Checkpoint

    run, at, step = argument.rpartition("@")
    if not at or not (step == NEWEST_PATH or step.isdecimal()):
        run, step = argument, NEWEST_PATH  # an @ in a folder's name
    found = open_run(named_argument("run", run))
    with explain_read_errors(found.folder):
        return Checkpoint.open(found.store, find_commit_key(found.store, step)), found.folder


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
    from holdfast.checkpoint.bucket.copy import copy_checkpoint
    from holdfast.checkpoint.restore.inspect import find_commit_key

    found = open_run(run)
    target = _location(to, found.folder)
    with explain_read_errors(found.folder), StageProgress() as progress:
        key = find_commit_key(found.store, step)
        try:
            done = copy_checkpoint(
                found.store,
                key,
                target,
                partial(progress.show_bytes, "copied"),
                say=progress.say,
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


def _location(to: str, source: Path) -> RunStore:
    """The run store that a location names. Raises CheckpointError for what cannot be one."""
    from holdfast.launch.run.run_folder import refuse_in_use
    from holdfast.wire.store.location import open_store, probe_store
    from holdfast.wire.store.run_location import store_of_run

    if "://" in to:
        store = open_store(to)
        probe_store(store, to.partition("?")[0])
        return store
    folder = Path(expand_argument("to", to))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("this is not a folder", where=to, remedy="name another one")
    if folder.exists() and folder.samefile(source):
        raise CheckpointError("this is the run itself", where=to, remedy="name another folder")
    refuse_in_use(folder, HolderWatch(folder, say))
    folder.mkdir(parents=True, exist_ok=True)
    return store_of_run(folder)


# --- prune ----------------------------------------------------------------------------------
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
    from holdfast.checkpoint.restore.catalog import list_commits
    from holdfast.checkpoint.restore.verify import find_newest_verified
    from holdfast.checkpoint.save import retention
    from holdfast.launch.run.run_folder import refuse_in_use

    found = open_run(run)
    refuse_in_use(found.folder, HolderWatch(found.folder, say))
    rejected: dict[str, str] = {}
    with explain_read_errors(found.folder):
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
        print_table(rows, head=("step", "generation", "size", "commit object"))
    verb = "would be removed" if dry_run else "removed"
    say(f"{len(gone)} checkpoints {verb}, {len(kept)} kept")


def _row(store: RunStore, key: str) -> tuple[str, ...]:
    from holdfast.checkpoint.restore.catalog import describe_checkpoint
    from holdfast.errors import HoldfastError

    try:
        found = describe_checkpoint(store, key)
    except HoldfastError:
        return "?", "?", "?", key
    return str(found["step"]), str(found["generation"]), format_bytes(found["bytes"]), key
