"""The stage `score`: a number for each document, by which `data.curriculum` orders them.

It leaves nothing out. The number is the perplexity under an n-gram model of some texts, or what a
user's function returns.
"""

from __future__ import annotations

from typing import Any

from holdfast.data.filters.perplexity import perplexity
from holdfast.data.filters.user_function import number_function
from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.data.filters.word_grams import read_table


def score_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `score`. The recipe names the folder of the table, or the function's file.
    Raises DataError for a function that cannot be used."""
    if recipe["function"] is not None:
        score = number_function(recipe)
        return lambda text: Verdict(text, score=score(text))
    model = tuple(read_table(recipe["table"], "keys", "logs", "backs", "unknown"))
    return lambda text: Verdict(text, score=perplexity(text, recipe["order"], model))
