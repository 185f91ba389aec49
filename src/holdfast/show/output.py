"""Output of commands: data to stdout, everything said about it to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from holdfast.api.progress import say as say
from holdfast.errors import UserError


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=_is_ascii_due(), default=str), flush=True)


def print_line(value: Any) -> None:
    """One JSON value on a line of its own, where lines are what is read."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=_is_ascii_due(), default=str)
    print(text, flush=True)


def _is_ascii_due() -> bool:
    """Return True if the output cannot show every character: JSON has escapes for that."""
    return not (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def print_table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> None:
    """Columns padded to their widest cell; the last is not padded."""
    cells = [[str(cell) for cell in row] for row in ([head] if head else []) + list(rows)]
    if not cells:
        return
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*padded, row[-1]]).rstrip())
    sys.stdout.flush()


def check_target(to: Path, option: str, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError before long work for a file that it could not write, or that it reads."""
    where = f"command line, {option} {to}"
    if to.exists() and any(path.exists() and path.samefile(to) for path in inputs):
        raise UserError("this is the file that is read", where=where, remedy="give another path")
    if to.is_fifo():  # opening it waits for a reader
        raise UserError("this is a named pipe", where=where, remedy="give a file")
    if to.is_dir() or not to.parent.is_dir():
        raise UserError(
            "this is a folder" if to.is_dir() else "there is no folder for this file",
            where=where,
            remedy="give a file in a folder that exists",
        )
    try:  # what a root user may write is known only by trying
        with to.open("ab") if to.exists() else TemporaryFile(dir=to.parent):
            pass
    except OSError as error:
        raise UserError(
            f"no file can be written here ({error.strerror})",
            where=where,
            remedy="give a file in a folder that you can write to",
        ) from None


def write_text(path: Path, text: str) -> None:
    """Write what a command made, and say so. Raises UserError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(
            f"it cannot be written ({error.strerror})",
            where=str(path),
            remedy="name a file in a folder that is there",
        ) from None
    say(f"wrote {path}")
