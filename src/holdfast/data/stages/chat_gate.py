"""The last look at chat data before a dataset is made of it: what is trained, and what is not.

A wrong template or mask leaves the loss curve fine and the model useless. So a set is refused in
which everything carries loss, or no reply teaches the model to stop. One sample is shown with its
mask. (Rows of which no token carries loss are left out before this, and a set of such rows alone is
refused there.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from holdfast.data.read.preference_rows import CHOSEN, REJECTED
from holdfast.data.stages.chat_tokens import ChatCounts
from holdfast.errors import DataError

SHOWN = 1200  # characters of the sample
LAST = 8  # tokens of a sample's end in a refusal


@dataclass(frozen=True)
class ShownDocument:
    """A document of the first row. title: what is written above it; "": nothing."""

    ids: NDArray[Any]
    mask: NDArray[Any]
    title: str = ""

    def show(self, tokenizer: Tokenizer, limit: int | None = SHOWN) -> str:
        text = show_masked(self.ids, self.mask, tokenizer, limit)
        return f"{self.title}:\n{text}" if self.title else text


def check_masks(
    name: str,
    counts: ChatCounts,
    sample: Sequence[ShownDocument],
    tokenizer: Tokenizer,
    stop: Mapping[str, int],
    special: Collection[int],
) -> Iterator[str]:
    """Lines about the masks of one source, with the first of its rows. Raises DataError.

    sample: the documents of a row. stop: tokens that end a reply.
    """
    ids, mask = sample[0].ids, sample[0].mask
    share = counts.targets / max(counts.tokens - counts.documents, 1)
    shown = "\n".join(one.show(tokenizer) for one in sample)
    is_pair = sample[0].title.startswith(CHOSEN)
    rows, what = (counts.documents // 2, "pairs") if is_pair else (counts.documents, "rows")
    if share >= 1:
        raise _refusal(
            name,
            "everything carries loss, prompts as well",
            "mend the template or the rows, or use rows: text to train on all text",
            shown,
        )
    if counts.begun_twice == counts.documents and int(ids[0]) in special:
        token = tokenizer.id_to_token(int(ids[0]))
        raise _refusal(name, f"each row begins with {token!r} twice", "mend the template", shown)
    if not counts.stopped:
        end = tokenizer.decode(_last_trained(ids, mask), skip_special_tokens=False)
        raise _refusal(
            name,
            f"no reply ends with a stop token ({', '.join(stop)}), so the model would not learn to "
            f"stop: the trained part ends with {end!r}",
            "mend the template, or name the right eos_token in tokenizer_config.json",
            shown,
        )
    yield f"{name}: {rows:,} {what}, {share:.1%} of the tokens carry loss"
    if counts.untrained:
        yield f"{name}: left out: {counts.untrained:,} {what} of which no token carries loss"
    if counts.stopped < counts.documents:
        missing = counts.documents - counts.stopped
        ending = f"a trained stop token ({', '.join(stop)})"
        yield f"{name}: {missing:,} replies do not end with {ending}"
    yield f"{name}: the first {what[:-1]}, what carries loss in [[ ]]:\n{shown}"


def _refusal(name: str, what: str, remedy: str, shown: str) -> DataError:
    return DataError(f"{what}; the first row is:\n{shown}", where=f"source {name!r}", remedy=remedy)


def _last_trained(ids: NDArray[Any], mask: NDArray[Any]) -> list[int]:
    return [int(i) for i in ids[np.flatnonzero(mask)][-LAST:]]


def show_masked(
    ids: NDArray[Any], mask: NDArray[Any], tokenizer: Tokenizer, limit: int | None = SHOWN
) -> str:
    """The text of a row; the parts that carry loss are in double brackets."""
    carries = mask > 0
    edges = np.flatnonzero(np.diff(carries.astype(np.int8))) + 1
    parts = []
    for piece, flags in zip(np.split(ids, edges), np.split(carries, edges), strict=True):
        if len(piece):
            text = tokenizer.decode([int(i) for i in piece], skip_special_tokens=False)
            parts.append(f"[[{text}]]" if flags[0] else text)
    text = "".join(parts)
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text):,} characters)"


def titles(rows: str, values: Sequence[float]) -> list[str]:
    """What is written above each document of a row. values: of the documents, if there are any."""
    if rows == "unpaired_preference":
        return [f"label {str(values[0] > 0).lower()}", "row of the KL baseline"]
    if rows == "preference":
        margin = f", margin {values[0]:g}" if len(values) else ""
        return [CHOSEN + margin, REJECTED]
    return [""]
