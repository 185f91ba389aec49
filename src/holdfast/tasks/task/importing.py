"""Knows whether this process is importing a user's task just now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IMPORTING: ContextVar[bool] = ContextVar("importing a task", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """While a task's module is imported."""
    token = _IMPORTING.set(True)
    try:
        yield
    finally:
        _IMPORTING.reset(token)


def is_importing() -> bool:
    """Return True in code that the import of a task's module runs."""
    return _IMPORTING.get()
