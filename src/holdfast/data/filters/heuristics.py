"""The heuristics of Gopher, C4 and FineWeb for English web text.

gopher: quality and repetition rules of appendix A1.1 of "Scaling Language Models" (2112.11446).
c4: section 2.2 of the T5 paper (1910.10683), without its list of bad words. It removes lines.
fineweb: the additional rules of section 3.6 of the FineWeb paper (2406.17557).

The limits are those of the papers, as datatrove has them. Words are found by an expression, not by
a tokenizer of a language.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from holdfast.data.filters.verdict import Stage, Verdict

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]+")
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_SENTENCE = re.compile(r"[.?!]+[\"')\]]*(?=\s+[\"'(\[]?[A-Z0-9]|\s*$)")
_END = (".", "?", "!", '"', "'")
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies"),
    "use cookies",
)
_TERMINALS = tuple(
    ".?!\u3002\uff01\uff1f\u2026\u061f\u06d4\u0964\u0965\u0589\u1367\u1362\u17d5"
)  # the ends of sentences in several scripts
_TOP_GRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED_GRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))


def split_words(text: str) -> list[str]:
    """Return words, and runs of punctuation, in order."""
    return _WORD.findall(text)


def heuristic_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `gopher`, `c4` or `fineweb`, without the rules that the recipe skips."""
    skipped = frozenset(recipe["skip_rules"])
    if recipe["kind"] == "c4":
        return partial(_judge_c4, skipped=skipped)
    rules = _gopher_rules if recipe["kind"] == "gopher" else _fineweb_rules

    def judge(text: str) -> Verdict:
        for rule, is_broken in rules(text):
            if is_broken and rule not in skipped:
                return Verdict(text, rule)
        return Verdict(text)

    return judge


def _gopher_rules(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each rule's name and whether the document breaks it."""
    words = split_words(text)
    plain = [word for word in words if any(map(str.isalnum, word))]
    yield "short", len(plain) < 50
    yield "long", len(plain) > 100_000
    mean = sum(map(len, plain)) / max(len(plain), 1)
    yield "short_words", mean < 3
    yield "long_words", mean > 10
    count = max(len(words), 1)
    yield "hashes", text.count("#") / count > 0.1
    yield "ellipses", (text.count("...") + text.count("…")) / count > 0.1
    lines = text.splitlines() or [""]
    yield "bullets", sum(line.lstrip().startswith(("•", "-")) for line in lines) > 0.9 * len(lines)
    ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    yield "ellipsis_lines", ends > 0.3 * len(lines)
    letters = sum(any(map(str.isalpha, word)) for word in words)
    yield "letters", letters / count < 0.8
    yield "stop_words", len(_STOP_WORDS.intersection(words)) < 2
    yield from _gopher_repetition(text, words)


def _gopher_repetition(text: str, words: list[str]) -> Iterator[tuple[str, bool]]:
    size = max(len(text), 1)
    paragraphs = _PARAGRAPHS.split(text.strip())
    repeated, characters = _repeated(paragraphs)
    yield "paragraphs", repeated / len(paragraphs) > 0.3
    yield "paragraph_characters", characters / size > 0.2
    lines = _LINES.split(text)
    repeated, characters = _repeated(lines)
    yield "lines", repeated / len(lines) > 0.3
    yield "line_characters", characters / size > 0.2
    for n, share in _TOP_GRAMS:
        grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
        top, times = grams.most_common(1)[0] if grams else ("", 0)
        yield f"top_{n}_grams", len(top) * times / size > share
    for n, share in _REPEATED_GRAMS:
        yield f"repeated_{n}_grams", _repeated_grams(words, n) / size > share


def _repeated(items: Sequence[str]) -> tuple[int, int]:
    """Return how many items repeat an earlier one, and their characters."""
    seen: set[str] = set()
    count = characters = 0
    for item in items:
        if item in seen:
            count += 1
            characters += len(item)
        seen.add(item)
    return count, characters


def _repeated_grams(words: list[str], n: int) -> int:
    """Return the characters of n-grams that repeat an earlier one, without overlap."""
    seen: set[tuple[str, ...]] = set()
    characters = place = 0
    while place < len(words) - n + 1:
        gram = tuple(words[place : place + n])
        if gram in seen:
            characters += sum(map(len, gram))
            place += n
        else:
            seen.add(gram)
            place += 1
    return characters


def _fineweb_rules(text: str) -> Iterator[tuple[str, bool]]:
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    ends = sum(line.endswith(_TERMINALS) for line in lines)
    yield "line_punctuation", ends / len(lines) < 0.12
    yield "short_lines", sum(len(line) <= 30 for line in lines) / len(lines) > 0.67
    characters = len(text) - text.count("\n")
    yield "repeated_lines", _repeated(lines)[1] / max(characters, 1) > 0.01
    yield "line_breaks", text.count("\n") / max(len(split_words(text)), 1) > 0.3


def _judge_c4(text: str, skipped: frozenset[str]) -> Verdict:
    """Remove lines; leave the document out if too little stays, or for its words."""
    kept: list[str] = []
    edits: Counter[str] = Counter()
    sentences = 0
    for raw in text.splitlines():
        line = raw.strip()
        words, small = line.split(), line.lower()
        if "citation" not in skipped:
            line, count = _CITATION.subn("", line)
            edits["citation"] += count
        rule = next((r for r in _line_rules(line, words, small) if r not in skipped), "")
        if rule in ("lorem_ipsum", "curly_bracket"):
            return Verdict(text, rule)
        if rule:
            edits[rule] += 1
            continue
        sentences += len(_SENTENCE.findall(line)) or 1
        kept.append(line)
    if sentences < 5 and "few_sentences" not in skipped:
        return Verdict(text, "few_sentences")
    counts = tuple((rule, count) for rule, count in edits.items() if count)
    return Verdict("\n".join(kept).strip(), edits=tuple(sorted(counts)))


def _line_rules(line: str, words: list[str], small: str) -> Iterator[str]:
    """Yield the rules that a line breaks, in the order of the reference implementation."""
    if any(len(word) > 1000 for word in words):
        yield "long_word"
    if not line.endswith(_END) or line.endswith("..."):
        yield "end_punctuation"
    if len(words) < 3:
        yield "few_words"
    if "lorem ipsum" in small:
        yield "lorem_ipsum"
    if "javascript" in small:
        yield "javascript"
    if "{" in line:
        yield "curly_bracket"
    if any(policy in small for policy in _POLICIES):
        yield "policy"
