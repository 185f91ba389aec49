"""Trains large language models on machines that come and go.

The public names are those of `__init__.pyi`; docs/guide/python.md explains them. Each is loaded
when it is first asked for, so that importing this package imports no torch.
"""

from importlib.metadata import version

from holdfast import public_names as __names

__all__ = list(__names.HOMES)


def __getattr__(name: str) -> object:
    """Return a public name, or `__version__`; each is looked up when it is asked for."""
    if name == "__version__":
        return version("holdfast")
    if name in __names.HOMES:
        return __names.load(name)
    if name in __names.MOVED:
        return __names.load_moved(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
