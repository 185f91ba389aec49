"""Near duplicates, next to rensa and datatrove: speed, and what each finds of planted pairs.

    python -m benchmarks.runtime.near_duplicates                     5,000 documents, 3 rounds
    python -m benchmarks.runtime.near_duplicates --documents 20000

All three take the same texts in one process with one thread, in turn, with shingles of five words.
One document in five is a near copy of an earlier one, at a Jaccard similarity of 0.85 or more. The
time is that of signatures and of the search, without reading files. datatrove writes its signatures
to files, as it does in a pipeline; its own tokenizer of English (spaCy) cuts words. It has 14
buckets of 8 values, its default; the rest has 256 values in 32 bands. A peer that is not installed
is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from holdfast.data.filters.plain import hash_document
from holdfast.data.filters.shingles import signature
from holdfast.data.stages.near_duplicates import find_near_duplicates

WORDS, COPIES = 400, 5  # words of a document; one in so many is a copy
CHANGES = 4  # words that a copy has in other places: 4 x 5 shingles of 396
SIMILARITY = 0.8


def make_texts(count: int, seed: int) -> list[str]:
    """Documents of which every fifth is a near copy of the one before."""
    rng = random.Random(seed)
    # Letters alone: datatrove takes all digits for one.
    letters = ["".join(part) for part in product("bdfgklmnprst", "aeiou")]
    vocabulary = ["".join(part) for part in product(letters[:27], repeat=3)]
    texts: list[list[str]] = []
    for number in range(count):
        if number % COPIES == 1:
            words = list(texts[-1])
            for place in rng.sample(range(WORDS), CHANGES):
                words[place] = rng.choice(vocabulary)
        else:
            words = rng.choices(vocabulary, k=WORDS)
        texts.append(words)
    return [" ".join(words) for words in texts]


def holdfast_duplicates(texts: list[str]) -> int:
    """Return how many documents are left out."""
    rows = np.array([hash_document(text) for text in texts], dtype=np.uint64)
    signatures = np.stack([signature(text, 5) for text in texts])
    kept = np.ones(len(texts), dtype=bool)
    return len(find_near_duplicates([rows], [kept], [signatures], [0], SIMILARITY).unit)


def rensa_duplicates(texts: list[str]) -> int:
    """Return how many documents are like an earlier one, by RMinHash and its index."""
    rensa: Any = import_module("rensa")
    index = rensa.RMinHashLSH(threshold=SIMILARITY, num_perm=256, num_bands=32)
    hashes, found = [], 0
    for number, text in enumerate(texts):
        words = text.lower().split()
        one = rensa.RMinHash(num_perm=256, seed=1)
        one.update([" ".join(words[i : i + 5]) for i in range(len(words) - 4)])
        hashes.append(one)
        if any(one.jaccard(hashes[i]) >= SIMILARITY for i in index.query(one)):
            found += 1
        else:
            index.insert(number, one)
    return found


def datatrove_duplicates(texts: list[str]) -> int:
    """Return how many documents its four steps remove."""
    steps: Any = import_module("datatrove.pipeline.dedup.minhash")
    document: Any = import_module("datatrove.data").Document
    import_module("loguru").logger.disable("datatrove")
    config = steps.MinhashConfig()
    with tempfile.TemporaryDirectory() as folder:
        places = {name: f"{folder}/{name}" for name in ("signatures", "buckets", "removed")}
        docs = [document(text=text, id=str(number)) for number, text in enumerate(texts)]
        steps.MinhashDedupSignature(places["signatures"], config).run(iter(docs), 0, 1)
        for bucket in range(config.num_buckets):
            buckets = steps.MinhashDedupBuckets(
                places["signatures"], places["buckets"], config=config
            )
            buckets.run(None, bucket, config.num_buckets)
        steps.MinhashDedupCluster(places["buckets"], places["removed"], config).run(None, 0, 1)
        kept = steps.MinhashDedupFilter(places["removed"]).run(iter(docs), 0, 1)
        return len(texts) - sum(1 for _ in kept)


SEARCHES: dict[str, Callable[[list[str]], int]] = {
    "holdfast": holdfast_duplicates,
    "rensa": rensa_duplicates,
    "datatrove": datatrove_duplicates,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    chosen: dict[str, str] = {}
    for name in SEARCHES:
        try:
            chosen[name] = "" if name == "holdfast" else version(name)
        except PackageNotFoundError:
            print(f"{name}: not installed")
    times: dict[str, list[float]] = {name: [] for name in chosen}
    found: dict[str, int] = {}
    for turn in range(given.rounds):
        texts = make_texts(given.documents, turn)
        for name in chosen:
            start = time.perf_counter()
            found[name] = SEARCHES[name](texts)
            times[name].append(time.perf_counter() - start)
    planted = len(range(1, given.documents, COPIES))
    print(f"{given.documents:,} documents of {WORDS} words, {planted:,} near copies, one thread")
    ours = times["holdfast"]
    for name, seconds in times.items():
        ratio = median(t / own for t, own in zip(seconds, ours, strict=True))
        print(
            f"{name} {chosen[name]}: {median(seconds):.2f} s, {ratio:.2f} times ours; "
            f"{found[name]:,} left out"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
