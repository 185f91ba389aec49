"""Turns what a checkpoint's bytes may do wrong into one sentence that names the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import CheckpointError, CorruptError
from holdfast.wire.store.run_store import MissingKeyError


@contextmanager
def explain_read_errors(where: str) -> Iterator[None]:
    """Inside, a checkpoint of the run at `where` is read."""
    try:
        yield
    except CheckpointError as error:
        place = f"{where}: {error.where}" if error.where else where
        raise CheckpointError(error.message, where=place, remedy=error.remedy) from None
    except CorruptError as error:
        raise CheckpointError(
            str(error),
            where=where,
            remedy=f"see which checkpoints are intact: holdfast checkpoint verify {where}",
        ) from None
    except MissingKeyError as error:
        raise CheckpointError(
            f"{error}; a run in progress may have removed it",
            where=where,
            remedy=f"see what is there: holdfast checkpoint list {where}",
        ) from None
