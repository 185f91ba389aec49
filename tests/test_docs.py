"""README.md, CHANGELOG.md, CONTRIBUTING.md and docs/: links, anchors, the menu, quoted messages."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.browser import browser
from tests.support.ranks import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^    .*$", re.DOTALL | re.MULTILINE)
MADE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # by tools/site.py
JOINT, VALUE = re.compile(r'"\s*\n\s*f?"'), re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
REMEDIES = DOCS / "guide/troubleshooting.md"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target.resolve()):
            broken.append(f"{link}: there is no such heading")
    assert broken == []


def test_every_page_is_in_the_menu_of_the_site() -> None:
    text = re.sub(r"!!python\S+.*", "x", (ROOT / "mkdocs.yml").read_text())
    named: list[str] = []

    def collect(menu: object) -> None:
        for each in menu if isinstance(menu, list) else [menu]:
            if isinstance(each, dict):
                collect(list(each.values()))
            elif isinstance(each, list):
                collect(each)
            else:
                named.append(str(each))

    collect(yaml.safe_load(text)["nav"])
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | set(MADE)
    assert sorted(named) == sorted(pages)


def test_the_quoted_messages_are_those_of_the_program() -> None:
    said = "\n".join(path.read_text() for path in (ROOT / "src/holdfast").rglob("*.py"))
    said = VALUE.sub("...", JOINT.sub("", said))
    quoted = re.findall(r"^### (.+)$", REMEDIES.read_text(), re.MULTILINE)
    assert len(quoted) >= 15
    assert [each for each in quoted if each not in said] == []


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions[0] == project["version"]


def test_the_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for command in ("make quickstart", "make test"):
        assert re.search(rf"^    {command}\b", text, re.MULTILINE), command


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_the_site_fits_the_window_of_a_real_browser(width: int, tmp_path: Path) -> None:
    """`make campaign` builds the site before."""
    site = ROOT / "build/site"
    if not site.exists():
        pytest.skip("there is no site: make docs-site")
    with browser(tmp_path) as tab:
        for page in ("index", "reference/api", "reference/run-file", "guide/troubleshooting"):
            tab.open(site / f"{page}.html", width)
            assert tab.value("document.documentElement.scrollWidth") <= width, page
            assert tab.value("document.querySelector('article h1') !== null"), page
            assert tab.value("[...document.images].every(each => each.naturalWidth > 0)"), page
