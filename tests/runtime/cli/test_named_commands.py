"""What messages, docstrings and docs name exists: commands, options, keys, extras and docs."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.cli.table import all_commands
from holdfast.config.loading import lora_from, model_from
from holdfast.config.loading.fields import as_path, field_at
from tests.support.ranks import ROOT

COMMANDS = all_commands()
FOLDERS = sorted({path.parent for path in (ROOT / "src").rglob("*.py")})
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# In code or quotes stands a complete command; elsewhere its name, up to the end of the clause.
COMMAND = re.compile(r"(?<![\w./`'-])('?)holdfast ([a-z][^`'\";\n]*)")
CODE = re.compile(r"`holdfast ([a-z][^`]*)`")
EXAMPLE = re.compile(r"^ {2,}holdfast ([a-z].*)$", re.MULTILINE)  # a line of its own
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
KEY = re.compile(
    r"(?<![\w./{])(?:data|train|model|layout|checkpoint|cluster)\.[a-z_0-9]+(?:\.[a-z_0-9]+)*(?![\w/(])"
)
PROSE = ("object", "key id", "import errors", "imports")  # formats and code, not commands
OF_OTHERS = (
    *(
        "--ulimit",
        "--head",
        "--namespace",
        "--switches",
        "--mail-type",
        "--add-kernel-support",
        *("--enable-lora", "--generation-config", "--logprobs-mode"),  # vLLM
        *("--ckpt-format", "--dist-ckpt-optim-fully-reshardable"),  # Megatron
        "--debug.save_config_file",  # torchtitan
    ),
    "--overlap",
)
"""Options of other programs that a sentence names."""
EXPANDED_KEYS = (model_from.KEY, model_from.CODE_KEY, lora_from.KEY)
OTHER_KEYS = (
    "data.md",
    "data.pkl",
    "train.py",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.dropout",
    "model.0.weight",
    "cluster.key",
    "cluster.yaml",
)
"""Files, a key of tokenizer.json, a parameter's name, and a word for any key."""


def texts_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Every string of a module, and whether it is a docstring. FILLED is what is filled in."""
    parts: set[ast.AST] = set()
    for node in nodes_of(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts |= set(node.values)
            yield "".join(map(part_of, node.values)), False
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(node.value)
            yield str(node.value.value), True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value, False


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, for less time: parents come before their children, names are left out."""
    found = [tree]
    while found:
        node = found.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.Name | ast.expr_context):
                found.append(value)


def part_of(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "FILLED"


@cache
def application(name: str) -> Any:
    return typer.main.get_command(import_module(COMMANDS[name].module).app)


@cache
def every_option() -> set[str]:
    return set().union(*(options_of(application(name)) for name in COMMANDS))


def subcommands(command: Any) -> dict[str, Any]:
    return dict(getattr(command, "commands", {}))


def options_of(command: Any) -> set[str]:
    of_subcommands = (options_of(inner) for inner in subcommands(command).values())
    own = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return own.union({"--help"}, *of_subcommands)


def parse(command: Any, words: list[str]) -> None:
    """Parse a complete command line, and do nothing. Raises what the parser raises."""
    if inner := subcommands(command):
        name, *rest = words
        # `holdfast simulate RUN` is short for `holdfast simulate run RUN`.
        command, words = (inner["run"], words) if _is_short(inner, name) else (inner[name], rest)
    with command.make_context("holdfast", list(words)):
        pass


def _is_short(inner: dict[str, Any], name: str) -> bool:
    return name not in inner and {"run", "mix"} <= set(inner)


def problem_of(quote: str, text: str) -> str | None:
    """Return what is wrong with a command that stands in a text; None if it can be typed."""
    words = text.split()
    if text.startswith(PROSE):
        return None
    if words[0] not in COMMANDS:
        return "there is no such command"
    command = application(words[0])
    inner = subcommands(command)
    if inner and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]) and words[1] not in inner:
        return f"there is no such command of {words[0]}"
    known = options_of(inner.get(words[1], command) if inner and len(words) > 1 else command)
    own, _, _ = text.partition(" -- ")  # what follows are the options of a script
    if unknown := set(OPTION.findall(own)) - known:
        return f"there is no {', '.join(sorted(unknown))}"
    given = words[2:] if inner else words[1:]
    if quote and given and "..." not in text and "[" not in text:
        try:
            parse(command, [re.sub(r"^[A-Z]$", "1", word) for word in shlex.split(text)[1:]])
        except Exception as error:
            return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return None


def named_commands(text: str) -> Iterator[tuple[str, str]]:
    for command in CODE.findall(text):
        yield "`", " ".join(command.split())
    for command in EXAMPLE.findall(text):
        yield "line", re.split(r" {2,}| [>|#] | && | \\", command)[0]
    for quote, command in COMMAND.findall(CODE.sub("", text)):
        yield quote, re.split(r"  |: |, |\. |\)|\|", command)[0].rstrip(".,:")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_module_names_exists(folder: Path) -> None:
    problems = [f"{p.name}: {problem}" for p in folder.glob("*.py") for problem in problems_in(p)]
    assert not problems, "\n".join(problems)


def problems_in(path: Path) -> list[str]:
    problems = []
    for text, is_docstring in texts_of(path):
        for quote, command in named_commands(text):
            if problem := problem_of(quote, command):
                problems.append(f"holdfast {command}: {problem}")
        if is_docstring or "report" in path.parts:  # style sheets have names like options
            continue
        if not {"cli", "doctor", "commands"} & set(path.parts) and " " in text:
            unknown = set(OPTION.findall(text)) - every_option() - set(OF_OTHERS)
            problems += [f"{option} in: {text[:100]}" for option in unknown]
        problems += [f"{key} in: {text[:100]}" for key in unknown_keys(text)]
        for page in re.findall(r"docs/[a-z/-]+\.md", text):
            if not (ROOT / page).exists():
                problems.append(f"there is no {page}")
        for extra in re.findall(r"holdfast\[(\w+)\]", text):
            if extra not in extras() | {"FILLED"}:
                problems.append(f"there is no extra {extra}")
    return problems


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text()
    problems = [
        f"holdfast {command}: {problem}"
        for quote, command in named_commands(text)
        if (problem := problem_of(quote, command))
    ]
    problems += [f"there is no key {key}" for key in unknown_keys(text)]
    assert not problems, "\n".join(problems)


def unknown_keys(text: str) -> list[str]:
    if " " not in text:
        return []  # an identifier, not a sentence
    found = set(KEY.findall(text)) - {*OTHER_KEYS, *EXPANDED_KEYS}
    return [key for key in sorted(found) if field_at(as_path(key)) is None]


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])
