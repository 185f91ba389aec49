"""The stage `contamination`: documents that hold n-grams of evaluation sets are left out.

An evaluation text with fewer words than an n-gram is looked for in full, if it has at least
`MIN_WORDS`. A shorter one stands in too many documents by chance. So it is not looked for, and a
line says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.data.filters.shingles import word_hashes
from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.data.filters.word_grams import Table, find_in, gram_hashes, read_table

MIN_WORDS = 8
"""Words of the shortest evaluation text that is looked for, if n-grams have more."""


def index_sets(sets: Sequence[Iterable[str]], size: int) -> Table:
    """Return the table of the n-grams of evaluation sets.

    `keys` are sorted and different. `sets` has the first set with each, `sizes` the sizes that
    occur. `short` has for each set its texts, and those that are too short: [sets, 2].
    """
    keys, owners, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint16)], set[int]()
    short = np.zeros((len(sets), 2), dtype=np.int64)
    for number, texts in enumerate(sets):
        for text in texts:
            words = word_hashes(text)
            short[number, 0] += 1
            width = min(size, len(words))
            if width < min(size, MIN_WORDS):
                short[number, 1] += 1
                continue
            sizes.add(width)
            keys.append(np.unique(gram_hashes(words, width)))
            owners.append(np.full(len(keys[-1]), number, dtype=np.uint16))
    found, first = np.unique(np.concatenate(keys), return_index=True)
    return {
        "keys": found,
        "sets": np.concatenate(owners)[first],
        "sizes": np.array(sorted(sizes), dtype=np.int64),
        "short": short,
    }


def contamination_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `contamination`. The recipe names the folder of the table. The rule is the
    name of the evaluation set of which the document has the most n-grams."""
    keys, owners, sizes = read_table(recipe["table"], "keys", "sets", "sizes")
    names = [entry["name"] for entry in recipe["texts"]]
    least = recipe["min_matches"]

    def judge(text: str) -> Verdict:
        words = word_hashes(text)
        places = [find_in(keys, np.unique(gram_hashes(words, n))) for n in sizes.tolist()]
        met = np.concatenate([np.zeros(0, np.int64), *places])
        counts = np.bincount(owners[met[met >= 0]], minlength=len(names))
        most = int(counts.argmax())
        rule = names[most] if counts[most] >= least else ""
        return Verdict(text, rule, score=float(counts[most]))

    return judge
