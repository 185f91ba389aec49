"""A package `ray` that does tasks in the process that asks: the driver's side without Ray."""

from __future__ import annotations

from pathlib import Path

_RAY = """
import os, time
from ray import data

if os.environ.get("FAKE_RAY") == "absent":
    raise ImportError("No module named 'ray'")
_held = []

def init(**given):
    if os.environ.get("FAKE_RAY") == "silent":
        time.sleep(3600)
    if os.environ.get("FAKE_RAY") == "refuses":
        raise ConnectionError("Version mismatch")

def put(value):
    _held.append(value)
    return len(_held) - 1

def get(reference):
    return _held[reference]
"""
_DATA = """
import os
import numpy as np

class DataContext:
    @staticmethod
    def get_current():
        return DataContext()

class from_items:
    def __init__(self, rows, override_num_blocks):
        self.rows, self.perform = rows, None

    def map_batches(self, perform, **given):
        self.perform = perform
        return self

    def iter_rows(self):
        for row in reversed(self.rows):
            if os.environ.get("FAKE_RAY") == "dies" and row["number"] == 0:
                os._exit(1)
            done = self.perform({name: np.array([value]) for name, value in row.items()})
            yield {name: values[0] for name, values in done.items()}
"""


def write_fake_ray(folder: Path) -> Path:
    """Write the package into a folder for PYTHONPATH. FAKE_RAY in the environment says what fails:
    absent, silent, refuses or dies."""
    package = folder / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_RAY)
    (package / "data.py").write_text(_DATA)
    return folder
