"""The schema for editors, and the page for people."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.loading.fields import all_keys
from holdfast.config.loading.reference import json_schema, markdown
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import PRESETS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "run-file.md"


def meanings_of_keys() -> dict[str, str]:
    """Each key of the page, with what it says of it."""
    rows = [row.split(" | ") for row in markdown().splitlines() if row.startswith("| `")]
    return {row[0].strip("| `").replace("<n>", "*"): row[-1].strip(" |") for row in rows}


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "run: make docs"


def test_every_key_is_on_the_page() -> None:
    page = markdown()
    missing = [key for key, _ in all_keys() if f"`{key.replace('*', '<n>')}`" not in page]
    assert missing == []


def test_every_key_has_a_meaning() -> None:
    assert [key for key, meaning in meanings_of_keys().items() if not meaning] == []
    assert "the preset's" not in "".join(
        line for line in markdown().splitlines() if "`train." in line
    )


def test_the_schema_describes_every_section_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert "required" not in schema["$defs"]["ModelConfig"], "a preset gives the shape"


def test_every_preset_is_a_model() -> None:
    for name in PRESETS:
        model = RunConfig.model_validate({"model": {"preset": name}}).model
        assert model.head_size % 2 == 0
        assert model.preset == name
