"""Fixtures that these tests share with those of the commands."""

from tests.runtime.cli.conftest import elsewhere

__all__ = ["elsewhere"]
