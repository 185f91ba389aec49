"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Fresh = Annotated[bool, typer.Option("--fresh", help="start over; the old folder is moved aside")]
JournalJson = Annotated[
    bool, typer.Option("--json", help="print the journal as JSON lines instead of a view")
]
