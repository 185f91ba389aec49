"""Hooks of mkdocs (mkdocs.yml): pages that are made from other files of the repository.

CHANGELOG.md and CONTRIBUTING.md become pages. The page of the Python API gets an entry for each
public name, from the docstrings and signatures in src. The page of troubleshooting gets every error
that src raises, with its remedy. Lists and tables get what Python-Markdown asks for and GitHub does
not: an empty line before them, and four spaces for a nested list.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SITE = "The [site](../internals/releasing.md#the-site) has"
API_MARK = f"{SITE} signatures and docstrings here."
ERROR_MARK = f"{SITE} every error with its remedy here, made from the sources."
OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)*((?:examples|deploy|src|tests|tools|benchmarks)\b[^)#]*)\)"
)
ITEM, NESTED = re.compile(r"(?:[-*]|1\.) "), re.compile(r" {2,3}(?=[-*] )")
FAMILIES = {
    "ConfigError": "The run file and the command line",
    "DataError": "Data",
    "ModelFolderError": "Folders of models",
    "TaskError": "Your own code",
    "CheckpointError": "Checkpoints",
    "RunFolderError": "Run folders and nodes",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose source lies outside docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, name in PAGES.items():
            text = text.replace(f"]({other})", f"]({name})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is made from src. Name files outside of docs/ without a link."""
    if API_MARK in markdown:
        markdown = markdown.replace(API_MARK, api_entries())
    if ERROR_MARK in markdown:
        markdown = markdown.replace(ERROR_MARK, error_tables())
    return spaced(OUTSIDE.sub(r"\1 (`\2`)", markdown))


def spaced(markdown: str) -> str:
    """Put an empty line before each list and table, and indent nested lists."""
    out, fenced = [""], False
    for line in markdown.split("\n"):
        fenced ^= line.startswith("```")
        if not fenced:
            before, kind = out[-1], "|" if line.startswith("|") else ITEM.match(line) and "-"
            inside = before.startswith("|") if kind == "|" else ITEM.match(before.lstrip())
            if kind and before.strip() and not inside and not before.startswith(" "):
                out.append("")
            line = NESTED.sub("    ", line)
        out.append(line)
    return "\n".join(out[1:])


def api_entries() -> str:
    """Return one entry for mkdocstrings for each public name."""
    return "\n\n".join(
        f"::: {module}.{name}\n    options:\n      heading: holdfast.{name}\n"
        for name, module in public_names().items()
    )


def error_tables() -> str:
    """Return a table of messages and remedies for each family of errors that src raises."""
    rows: dict[str, set[tuple[str, str]]] = {name: set() for name in [*FAMILIES.values(), "More"]}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            if not (isinstance(node, ast.Call) and name.endswith("Error") and node.args):
                continue
            given = {each.arg: each.value for each in node.keywords}
            message, remedy = words_of(node.args[0]), words_of(given.get("remedy"))
            if len(message.replace("...", "").split()) >= 3 and "remedy" in given:
                rows[FAMILIES.get(name, "More")].add((message, remedy or "..."))
    out: list[str] = []
    for family, found in rows.items():
        out += ["", f"### {family}", "", "| message | remedy |", "|---|---|"]
        out += [f"| {message} | {remedy} |" for message, remedy in sorted(found)]
    return "\n".join(out)


def words_of(node: ast.expr | None) -> str:
    """Return a message with `...` for each value; "" for one that is no literal."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    words = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts]
    text = " ".join("".join(words).split()).replace("|", "\\|").replace("<", "&lt;")
    return "" if text == "..." else text.replace("*", "\\*").replace("[", "\\[")


def public_names() -> dict[str, str]:
    """Return name -> module, as `holdfast/public_names.py` has them, without an import."""
    tree = ast.parse((ROOT / "src/holdfast/public_names.py").read_text())
    homes = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HOMES"
    )
    return dict(ast.literal_eval(homes))
