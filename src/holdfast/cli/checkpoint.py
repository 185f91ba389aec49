"""`holdfast checkpoint`: the states that a run could resume from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import checkpoint_import, checkpoint_tools
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.launch.run.runs import open_run
from holdfast.layout import AXES
from holdfast.report.formatting import format_bytes, format_count
from holdfast.show.output import print_json, print_table, say

app = make_app("List, show, verify, compare, copy, remove and import checkpoints.")

Json = Annotated[bool, typer.Option("--json", help="print JSON")]

MAX_BOXES_NAMED = 3  # of a tensor, in the table of `show`; --json names them all


@app.command("list")
def list_(run: RunArgument, json: Json = False) -> None:
    """List the committed checkpoints, newest first.

    \b
    Example:
      holdfast checkpoint list runs/quickstart
    """
    from holdfast.checkpoint.restore.catalog import describe_checkpoint, list_commits
    from holdfast.errors import HoldfastError

    found = open_run(run)
    rows, described = [], []
    for key in list_commits(found.store):
        try:
            row = describe_checkpoint(found.store, key)
        except HoldfastError as error:
            if key not in list_commits(found.store):
                continue  # a run at work removed it
            row = {"key": key, "problem": str(error)}
            rows.append(("?", "?", "?", str(error)))
        else:
            rows.append((row["step"], row["generation"], format_bytes(row["bytes"]), key))
        described.append(row)
    if json:
        print_json(described)
    elif rows:
        print_table(rows, head=("step", "generation", "size", "commit object"))
    else:
        say(f"{found.folder} has no checkpoint")


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
    from holdfast.checkpoint.restore.inspect import commit_to_json as contents
    from holdfast.checkpoint.restore.inspect import find_commit_key
    from holdfast.cli.read_errors import explain_read_errors
    from holdfast.core.format.manifest import Commit

    found = open_run(run)
    with explain_read_errors(found.folder):
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
        ("generation", str(shown["generation"])),
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
    from holdfast.checkpoint.restore.catalog import list_commits
    from holdfast.checkpoint.restore.inspect import find_commit_key
    from holdfast.checkpoint.restore.verify import verify as problems_of
    from holdfast.cli.read_errors import explain_read_errors

    found = open_run(run)
    if step is None:
        keys = list_commits(found.store)
    else:
        with explain_read_errors(found.folder):
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
            say(f"{found.folder} has no checkpoint")
    return 1 if any(problems.values()) else 0


app.command("diff")(checkpoint_tools.diff)
app.command("copy")(checkpoint_tools.copy)
app.command("prune")(checkpoint_tools.prune)
app.command("import")(checkpoint_import.import_)
