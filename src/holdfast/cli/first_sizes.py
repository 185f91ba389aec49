"""Sizes of a first run on few rows or texts: a pass over them has several steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.raw_rows import raw_rows
from holdfast.data.read.source_files import find_files
from holdfast.errors import DataError
from holdfast.report.formatting import format_count, format_plural

BATCH = 16  # samples of a step, if there is enough data
BYTES_PER_TOKEN = 4  # of English texts, and of rows with their keys in the place of a template
ENOUGH_BYTES = 4_000_000  # a pass over so many has STEPS of any size that init writes
STEPS = 10  # of a pass, at least
MAX_PASSES = 20  # over few texts; more of them repeat the texts by heart
EPOCHS = 3  # passes over rows
FULL_STEPS = 1000  # over texts
USUAL_WARMUP = 20  # steps, of the key's default
LONGEST_WARMUP = 5  # steps; a fine-tuning run begins with a low rate anyway


@dataclass(frozen=True)
class FirstSizes:
    """Sizes of a run. The defaults fit much data."""

    length: int  # tokens of a sample
    batch: int = BATCH
    microbatch: int = 2
    pass_steps: int = 0  # about; 0: not known, and many
    note: str = ""  # why they are smaller than usual; "" if they are not

    def warmup(self, *, is_rows: bool) -> int | None:
        """Steps: a tenth of the run. None: the default fits."""
        longest = LONGEST_WARMUP if is_rows else USUAL_WARMUP
        tenth = (EPOCHS if is_rows else self.epochs) * self.pass_steps // 10
        if tenth < longest and self.pass_steps and (is_rows or self.epochs):
            return tenth
        return longest if is_rows else None

    @property
    def epochs(self) -> int:
        """Passes over texts that take fewer than FULL_STEPS; 0: FULL_STEPS are no more."""
        return MAX_PASSES if 0 < self.pass_steps * MAX_PASSES < FULL_STEPS else 0


def first_sizes(source: SourceConfig, length: int, *, is_rows: bool) -> FirstSizes:
    """Return sizes with which a pass over a source has STEPS, or as many as it can.

    A shorter sample still holds the longest row. length: of a sample, if there is much data."""
    entries = _bytes_of_entries(source)
    if not entries:
        return FirstSizes(length)
    tokens = sum(entries) / BYTES_PER_TOKEN
    batch, usual = BATCH, length
    # Twice the tokens of English, for other languages, and the template's own.
    row_tokens = 2 * max(entries) / BYTES_PER_TOKEN + 128 if is_rows else length
    while length / 2 >= row_tokens and tokens / length < STEPS * batch:
        length //= 2
    while batch > 1 and tokens / length < STEPS * batch:
        batch //= 2
    steps = max(1, round(tokens / length / batch))
    note = ""
    if (length, batch) != (usual, BATCH):
        rows = f"{format_plural(len(entries), 'row')}, " if is_rows else ""
        note = (
            f"{source.path} is small: {rows}some {format_count(round(tokens))} tokens. So a step "
            f"takes {format_plural(batch, 'sample')} of {length} tokens, and a pass has about "
            f"{format_plural(steps, 'step')}; with more data use train.batch_size={BATCH}"
        )
    return FirstSizes(length, batch, 2 if batch >= 4 else 1, steps, note)


def _bytes_of_entries(source: SourceConfig) -> list[int]:
    """Return the bytes of each row or file; [] for much data, and for what is not read here."""
    sizes, total = list[int](), 0
    with suppress(DataError):  # a start refuses the row, with its place
        for size in _entries(source):
            sizes.append(size)
            if (total := total + size) > ENOUGH_BYTES:
                return []
    return sizes


def _entries(source: SourceConfig) -> Iterator[int]:
    if source.kind in ("jsonl", "parquet"):
        yield from (len(row.encode()) for row in raw_rows(source))
    elif source.kind in ("text", "csv"):
        yield from (size for _, size in find_files(source, "data.sources[0]").files)
