"""Commands write where they stand: let that be the test's own folder."""

from tests.runtime.cli.conftest import elsewhere

__all__ = ["elsewhere"]
