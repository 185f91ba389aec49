"""The stage `language`: documents in other languages are left out, as py3langid tells them.

py3langid sums in float32 by a library of the processor. Here the same sum is taken in float64, row
by row, and the probability is rounded. So processors agree on it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.errors import DataError, use_one_of

PACKAGE = "py3langid"
JUDGED_CHARACTERS = 20_000
"""A document is judged by so much of its beginning."""
DIGITS = 4
"""Decimal digits of a probability that count."""


def library_version() -> str | None:
    """Return the name and version of the library, which decide what a stage does; None if it is not
    installed."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return None


@cache
def load_identifier() -> Any:
    """Return what names the language of a text. Raises DataError without the library."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise DataError(
            f"the stage language needs {PACKAGE}",
            where="data.stages",
            remedy="pip install 'holdfast[language]'",
        ) from None

    class Identifier(LanguageIdentifier):  # type: ignore[misc]
        __slots__ = ()

        def _sparse_score(self, visits: dict[int, int], table: Any) -> Any:
            rows = np.fromiter(visits.keys(), np.intp, len(visits))
            counts = np.fromiter(visits.values(), np.float64, len(visits))
            scores = self.nb_pc.astype(np.float64)
            for start in range(0, len(rows), 256):
                block = slice(start, start + 256)
                scores += (np.log1p(counts[block])[:, None] * table[rows[block]]).sum(axis=0)
            return scores

    return Identifier.from_model_file(MODEL_FILE, norm_probs=True)


def identify(text: str) -> tuple[str, float]:
    """Return the code of a text's language, and its probability."""
    code, probability = load_identifier().classify(text[:JUDGED_CHARACTERS])
    return str(code), round(float(probability), DIGITS)


def check_languages(codes: tuple[str, ...], where: str) -> None:
    """Raises DataError for a code that the library does not know."""
    known = sorted(load_identifier().labels)
    if unknown := [code for code in codes if code not in known]:
        raise DataError(
            f"{unknown[0]} is no language that {PACKAGE} knows",
            where=where,
            remedy=use_one_of(known),  # the nearest in spelling is another language
        )


def language_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `language`. Its rules are the language of a document, and `unsure`."""
    wanted, least = frozenset(recipe["languages"]), recipe["min_probability"]

    def judge(text: str) -> Verdict:
        code, probability = identify(text)
        rule = code if code not in wanted else "unsure" if probability < least else ""
        return Verdict(text, rule, score=probability)

    return judge
