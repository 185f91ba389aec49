"""The README of the helpers names each of them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_readme_names_every_helper() -> None:
    text = (FOLDER / "README.md").read_text()
    helpers = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
    helpers |= {f"{path.parent.name}/" for path in FOLDER.glob("*/__init__.py")}
    assert not [name for name in helpers if f"`{name}`" not in text]
