"""YAML as a run file uses it: values by the 1.2 core schema, a line for each key."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.loading.model_from import yaml_word
from holdfast.config.loading.yaml_tree import dump, parse_scalar, parse_value, parse_yaml
from holdfast.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("1_000", 1000),
        ("0x10", 16),
        ("3e-3", 3e-3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("6.", 6.0),
        ("1E3", 1000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-11-21", "2026-11-21"),
        ("e3", "e3"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_scalar(".nan"))  # type: ignore[arg-type]


def test_quoted_numbers_are_text() -> None:
    assert parse_yaml("a: '1'\nb: \"true\"\n", "f").value == {"a": "1", "b": "true"}


def test_every_key_has_its_line() -> None:
    tree = parse_yaml("a: 1\nb:\n  c: [1, 2]\n  d:\n    - e: 5\n\n    - e: 6\n", "f")
    assert tree.lines["b", "c"] == 3
    assert tree.lines["b", "d", 1, "e"] == 7


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "the run file is empty"),
        ("# only a comment\n", None, "the run file is empty"),
        ("- 1\n", 1, "a run file is made of sections and keys"),
        ("train\n", 1, "a run file is made of sections and keys"),
        ("a: 1\nb: 2\na: 3\n", 3, "a was already given on line 1"),
        ("b:\n  a: 1\n  a: 2\n", 3, "b.a was already given on line 2"),
        ("a:\n\tb: 1\n", 2, "a tab cannot indent YAML"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("a: [1,\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "one YAML document"),
        ("a: &x 1\n", 1, "anchors"),
        ("b: 1\na: *x\n", 2, "aliases"),
        ("b: 1\na: *x*\n", 2, "put it in quotes if it is text"),
        ("a: !!python/object:os.system x\n", 1, "the tag !!python/object:os.system"),
        ("a: !mine x\n", 1, "the tag !mine"),
        ("? [a]\n: 1\n", 1, "a key must be a word"),
        ("a: \x00\n", 1, "does not belong in a text file"),
        ("a: 1\nb: \x1b[0m\n", 2, "does not belong in a text file"),
        ("a: " + "[" * 40 + "]" * 40, 1, "nested too deeply"),
        ("a: " + "[" * 5000, None, "nested too deeply"),
    ],
)
def test_refusals_name_the_line(text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    said = str(caught.value)
    assert said.startswith("run.yaml: " if line is None else f"run.yaml:{line}: ")
    assert words in said
    assert "\n" not in said


def test_values_of_the_command_line() -> None:
    assert parse_value("[0.9, 0.99]", "x") == [0.9, 0.99]
    assert parse_value("{kind: text, path: a b}", "x") == {"kind": "text", "path": "a b"}
    assert parse_value("", "x") is None
    assert parse_value("'200'", "x") == "200"


@given(st.text(max_size=200))
def test_any_text_is_a_tree_or_a_refusal(text: str) -> None:
    try:
        outcome: object = parse_yaml(text, "run.yaml").value
    except ConfigError as error:
        outcome = str(error)
    assert isinstance(outcome, dict) or str(outcome).startswith("run.yaml")


TEXTS = ["1e-4", "0000000009", "x #y", "a: b", "no", "true", "~", "", "[a]", "sp ace/x", "*a", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_written_text_is_read_as_itself(text: str) -> None:
    written = dump({"name": text, "items": [text]})
    assert parse_yaml(written, "run.yaml").value == {"name": text, "items": [text]}
    assert parse_value(yaml_word(text), "") == text
