"""The prose gate: counts banned words and long sentences per file, and fails if a count rises.

python tools/prose.py                  check against tools/prose_counts.json
python tools/prose.py --update         store lower counts; store all counts if the file is missing
python tools/prose.py --list PATH ...  print each finding below these paths
python tools/prose.py --totals         print the sums per folder

A file without stored counts must have no findings. Code, code spans and URLs are not read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

LONGEST = 25  # words of a sentence
MESSAGE = 5  # a string literal of src/ with fewer words is not read: mostly keys and formats

# of lower case text: four times as fast as with IGNORECASE
BANNED = re.compile(
    r"""\b(?=[abdeghinorstw])(?: who(?:m|so)?ever | (?:some|no|every|any)body | (?:some|every)one
    | others | he(?!\ et\ al) | him | his | himself | those\ who | anew | besides?
    | go(?:es|ing|ne)?\ on(?!\ (?:a|an|the|its|each|every|disk|stdout|stderr)\b) | went\ on
    | st(?:ands?|anding|ood)\ still | rotten | gone | whole(?!(?:\ |-)numbers?\b)
    | (?:do|does|did|doing)\ without | done\ without(?!\ (?:an?|any|the|\w+ing)\b)
    | (?:is|are|was|were|be|been|being)(?:\ (?:not|never|then|also|only|once|first|still))?\ told
      (?!\ (?:apart|from)\b)
    | as\ (?:it\ is|they\ are)\ there | be\ had | in\ a\ word | (?:in\ )?(?:as|so)\ far\ as
    | (?<!are\ )(?<!were\ )(?<!be\ )all\ the\ same(?!\ \w) | or\ else
    )\b | (?<=[,;:(]\ )(?:else|be\ it)\b""",
    re.VERBOSE,
)
OPENING = re.compile(r"[\W_]*(Where|Who|Whose|Whom|Else|Be it)\b(?![^?]*\?\W*$)")
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)(?<!\bal)[.!?]+[\"')\]*]*(?:\s+|$)")
WORD = re.compile(r"\S*\w\S*")
MASKED = re.compile(r"``.+?``|`[^`]+`|(?<=\])\([^)\s]*\)|\w+://\S+")
FIELD = re.compile(r"\{\{|\}\}|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
ITEM = re.compile(r"(?:[-*+]|\d+[.)]|#+)\s")
COLUMNS = re.compile(r"\S+(?: \S+){0,5}\s{2,}\S")  # a term, and what it means
ENTRY = re.compile(r"\*{0,2}\w+(?: \([^)]*\))?:\s")  # of an Args block
QUOTED = "|".join(
    rf"{q * 3}[^{q}\\]*(?:(?:\\.|{q}(?!{q * 2}))[^{q}\\]*)*{q * 3}|{q}[^{q}\\]*(?:\\.[^{q}\\]*)*{q}"
    for q in "\"'"
)
TOKEN = re.compile(rf"{QUOTED}|#[^\n]*", re.DOTALL)
PREFIX = re.compile(r"\b[rRbBuUfF]{1,2}$")
TOOLING = re.compile(r"#(?:!| ?(?:noqa|type:|pragma|ruff:|mypy:|fmt:))")

Lines = list[tuple[int, str]]  # line number and text
Counts = dict[str, tuple[int, int]]  # path: banned words, long sentences


class Finding(NamedTuple):
    """A banned word, or a long sentence if `words` is not 0."""

    line: int
    text: str
    words: int = 0

    def __str__(self) -> str:
        return f"line {self.line} " + (f"({self.words} words)" if self.words else repr(self.text))


def mask(match: re.Match[str]) -> str:
    """Return one word of the match's length, so that offsets stay valid."""
    return re.sub(r"[^\n]", " " if match[0].startswith("(") else "_", match[0])


def blocks(lines: Iterable[tuple[int, str]]) -> Iterator[Lines]:
    """Yield each paragraph, list item, heading, Args entry and table cell; skip code."""
    block: Lines = []
    as_is, fenced, code, blank, previous = False, False, False, True, 0
    for number, raw in [*lines, (0, "")]:
        text, indent = raw.strip(), len(raw) - len(raw.lstrip())
        as_is = text == "\\b" or (as_is and bool(text))  # click's mark of a paragraph not to wrap
        fence = text.startswith(("```", "~~~"))
        fenced ^= fence
        row = text.startswith("|")
        item = ITEM.match(text) or COLUMNS.match(text) or (indent and ENTRY.match(text))
        code = as_is or (indent >= 4 and (code or (blank and not ITEM.match(text))))
        if block and (not text or fence or code or row or item or indent < previous):
            yield block
            block = []
        if row and not fenced:
            yield from ([(number, cell)] for cell in MASKED.sub(mask, text).split("|"))
        elif text and not (fenced or fence or code or row):
            block.append((number, text))
        blank, previous = not text, indent if text else 0


def python_texts(source: str, messages: bool) -> Iterator[Lines]:
    """Yield docstrings and comments, and other string literals if `messages` is true.

    A regular expression finds them: it is six times faster than `tokenize`.
    """
    comment: Lines = []
    literal: Lines = []
    column = depth = end = 0
    number = 1
    for found in TOKEN.finditer(source):
        start, token = found.start(), found[0]
        prefix = PREFIX.search(source, start - 2 if start > 2 else 0, start)
        letters = prefix[0].lower() if prefix and start > end else ""
        start -= len(letters)
        gap = source[end:start]
        number += gap.count("\n")
        depth += sum(map(gap.count, "([{")) - sum(map(gap.count, ")]}"))
        at = start - source.rfind("\n", 0, start)
        statement = depth == 0 and not source[start - at + 1 : start].strip()
        is_comment = token[0] == "#"
        if literal and (gap.strip() or (statement and not is_comment)):
            yield from messages_of(literal)
            literal = []
        if is_comment and not TOOLING.match(token):
            if comment and (at != column or comment[-1][0] != number - 1):
                yield comment
                comment = []
            comment.append((number, token[1:].removeprefix(" ")))
            column = at
        elif not is_comment and (statement or messages):
            lines = literal_lines(letters, token, number)
            if statement:
                yield lines
            else:
                literal += lines
        number += token.count("\n")
        end = found.end()
    yield from (comment, *messages_of(literal))


def messages_of(literal: Lines) -> list[Lines]:
    """Return a string literal if it has the words of a message."""
    words = re.findall(r"\b[A-Za-z][a-z]+\b", " ".join(text for _, text in literal))
    return [literal] if len(words) >= MESSAGE else []


def literal_lines(prefix: str, token: str, number: int) -> Lines:
    """Return the lines of a string literal without its common indentation."""
    quotes = 3 if token[:3] in ('"""', "'''") else 1
    body = token[quotes:-quotes]
    if "b" in prefix:
        return []
    if "f" in prefix:
        body = FIELD.sub(mask, body)
    if quotes == 1:  # its line breaks are meant, those of the source are not
        body = body.replace("\\n", "\n\n").strip(" ")
        return [(number, re.sub(r"\\(.)", r"\1", line)) for line in body.split("\n")]
    first, *rest = body.replace("\\\n", "\n").split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return list(enumerate([first.strip(), *(line[margin:] for line in rest)], number))


def texts(path: Path, source: str, messages: bool) -> Iterator[Lines]:
    """Yield what is prose in a file: all of Markdown, the comments of YAML, see `python_texts`."""
    if path.suffix == ".md":
        yield list(enumerate(source.split("\n"), 1))
    elif path.suffix == ".py":
        yield from python_texts(source, messages)
    else:
        for number, line in enumerate(source.split("\n"), 1):
            if found := re.search(r"(?:^|\s)#\s?(.*)", line):
                yield [(number, found[1])]


def findings(path: Path, source: str, messages: bool) -> Iterator[Finding]:
    """Yield what a file's author should rewrite."""
    for block in (block for lines in texts(path, source, messages) for block in blocks(lines)):
        starts = [0, *accumulate(len(text) + 1 for _, text in block)]
        prose = MASKED.sub(mask, " ".join(text for _, text in block))

        def line(offset: int, block: Lines = block, starts: list[int] = starts) -> int:
            return block[bisect_right(starts, offset) - 1][0]

        for match in BANNED.finditer(prose.lower()):
            yield Finding(line(match.start()), match[0])
        begin = 0
        for end in [*(match.end() for match in END.finditer(prose)), len(prose)]:
            sentence = prose[begin:end]
            heading = sentence.startswith("#")
            if not heading and (opening := OPENING.match(sentence)):
                yield Finding(line(begin + opening.start(1)), opening[1])
            if (words := len(WORD.findall(sentence))) > LONGEST:
                yield Finding(line(begin), sentence.strip()[:60], words)
            begin = end


def files(root: Path) -> Iterator[Path]:
    """Yield the files that have prose, relative to the root and sorted."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    for folder in ("src", "benchmarks", "tests", "tools", "examples"):
        found += (root / folder).rglob("*.py")
    found += (root / "examples").rglob("*.yaml")
    yield from sorted(path.relative_to(root) for path in found if path.is_file())


def read(root: Path) -> dict[str, list[Finding]]:
    """Return the findings of each file in the tree."""
    found = {}
    for path in files(root):
        text = (root / path).read_text("utf-8")
        these = findings(path, text, messages=path.parts[0] == "src")
        found[path.as_posix()] = sorted(these, key=lambda finding: finding.line)
    return found


def count(found: Iterable[Finding]) -> tuple[int, int]:
    """Return how many banned words and how many long sentences there are."""
    kinds = Counter(finding.words > 0 for finding in found)
    return kinds[False], kinds[True]


def complaint(path: str, found: list[Finding], allowed: tuple[int, int]) -> str | None:
    """Return one line for a file with more findings than allowed, None otherwise."""
    said = []
    for is_long, kind in enumerate(("banned words", "long sentences")):
        these = [finding for finding in found if (finding.words > 0) == is_long]
        if len(these) > allowed[is_long]:
            where = ", ".join(map(str, these))
            said.append(f"{len(these)} {kind}, {allowed[is_long]} allowed: {where}")
    return f"{path}: {'; '.join(said)}" if said else None


def room(path: str) -> str:
    """Return the folder whose sum a file belongs to."""
    parts = path.split("/")
    depth = 3 if parts[0] == "src" else 2 if parts[0] == "tests" else 1
    return "/".join(parts[: min(depth, len(parts) - 1)]) or path


def print_totals(counts: Counts) -> None:
    """Print the sums per folder and of the tree."""
    sums: dict[str, tuple[int, int]] = {}
    for path, (banned, long) in counts.items():
        for name in (room(path), "total"):
            before = sums.get(name, (0, 0))
            sums[name] = before[0] + banned, before[1] + long
    total = sums.pop("total", (0, 0))
    for name, (banned, long) in [*sorted(sums.items()), ("total", total)]:
        print(f"{name:28} {banned:6} banned words {long:6} long sentences")


def load(path: Path) -> Counts | None:
    """Return the stored counts, None without a file."""
    if not path.exists():
        return None
    return {name: (pair[0], pair[1]) for name, pair in json.loads(path.read_text("utf-8")).items()}


def lower(counts: Counts, known: Counts) -> Counts:
    """Return the smaller of the present and the stored counts; a new file gets zeros."""
    old = {path: known.get(path, (0, 0)) for path in counts}
    return {p: (min(b, old[p][0]), min(n, old[p][1])) for p, (b, n) in counts.items()}


def store(path: Path, counts: Counts) -> None:
    """Write the counts that are not 0, sorted by path."""
    rows = [
        f"  {json.dumps(name)}: {list(pair)}" for name, pair in sorted(counts.items()) if any(pair)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run one mode; return 1 if a count rose."""
    parser = argparse.ArgumentParser(description="Check the prose of docs, docstrings, messages.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--counts", type=Path, help="default: tools/prose_counts.json of the root")
    parser.add_argument("--update", action="store_true", help="store lower counts")
    parser.add_argument("--list", nargs="+", metavar="PATH", help="print each finding")
    parser.add_argument("--totals", action="store_true", help="print the sums per folder")
    options = parser.parse_args(arguments)
    stored_at = options.counts or options.root / "tools" / "prose_counts.json"
    found = read(options.root)
    counts = {path: count(these) for path, these in found.items()}
    if options.list:
        chosen = tuple(str(path).removeprefix("./").rstrip("/") for path in options.list)
        for path in (p for p in found if any(p == c or p.startswith(c + "/") for c in chosen)):
            for finding in found[path]:
                kind = f"{finding.words} words: {finding.text}" if finding.words else finding.text
                print(f"{path}:{finding.line}: {kind}")
        return 0
    if options.totals:
        print_totals(counts)
        return 0
    known = load(stored_at)
    if options.update:
        kept = counts if known is None else lower(counts, known)
        store(stored_at, kept)
        known = kept
    return check(found, known or {})


def check(found: dict[str, list[Finding]], known: Counts) -> int:
    """Print a line for each file whose count rose, and the sums; return the exit code."""
    complaints = [complaint(path, these, known.get(path, (0, 0))) for path, these in found.items()]
    risen = [text for text in complaints if text]
    for text in risen:
        print(text)
    counts = {path: count(these) for path, these in found.items()}
    banned, long = (sum(pair[kind] for pair in counts.values()) for kind in (0, 1))
    print(f"prose: {banned} banned words, {long} long sentences in {len(found)} files")
    if not risen and (fewer := sum(counts[p] != known.get(p, (0, 0)) for p in counts)):
        print(f"prose: {fewer} files have fewer than stored: run python tools/prose.py --update")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
