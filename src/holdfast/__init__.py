"""Trains large language models on machines that come and go."""

from importlib.metadata import version


def __getattr__(name: str) -> str:
    """Return `__version__`, which is looked up when it is asked for."""
    if name == "__version__":
        return version("holdfast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
