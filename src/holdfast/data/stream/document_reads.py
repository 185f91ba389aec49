"""Which steps of a run read a document: its place in the dataset, and the ledger.

The document is found by its tokens, so a dataset needs no index of documents. A sample holds a
document if any of its inputs or targets is a token of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.core.data import lineage
from holdfast.core.data.data_ledger import LedgerEntry
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.data.filters.chain import Chain
from holdfast.data.filters.plain import document_name, hash_document
from holdfast.data.read.features import FeatureFormat
from holdfast.data.read.text_sources import text_document
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stages.unit_tasks import encode_documents
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import DataError
from holdfast.events import BatchFed, Record


@dataclass(frozen=True)
class DocumentPlace:
    """Tokens [start, stop) of a stream. document: its number there."""

    split: str
    source: int
    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class DocumentReads:
    """The steps of a run that read a document, in order and each once."""

    steps: tuple[int, ...]  # that the run's state contains
    lost: tuple[int, ...]  # whose work was lost and done again


class FedBatches(Protocol):
    """Every batch of a run; `data.batch.Batches` is one."""

    schedule: BatchSchedule
    sequence_length: int
    has_features: bool

    @property
    def order(self) -> SampleOrder: ...

    def position_of(self, source: int, start: int) -> int:
        """As `batch.Batches.position_of`."""
        ...


def read_document(path: Path, limit: int) -> str:
    """Return the text of a file in normal form. Raises DataError."""
    try:
        return text_document(str(path), limit, xxh3_128())
    except OSError as error:
        raise _unreadable_error(path, error) from None


def _unreadable_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the document cannot be read: {error.strerror}",
        where=str(path),
        remedy="name a file with one document",
    )


def document_hash(text: str) -> str:
    """Return the name of a document in `removed.jsonl` and in the stage `remove`."""
    return document_name(*hash_document(text)[:2])


def find_document(dataset: Dataset, text: str) -> list[DocumentPlace]:
    """Return where a document lies in a dataset: several places if duplicates were kept. The stages
    of its source change the text as they did when it was prepared. Raises DataError for chat data,
    whose documents are rows."""
    places: list[DocumentPlace] = []
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    recipes = list(enumerate(dataset.manifest["settings"].get("stages", ())))
    recipes = [
        (index, {**recipe, "place": file} if file else recipe)
        for (index, recipe), file in zip_longest(recipes, dataset.function_files)
    ]
    for source, name in enumerate(dataset.source_names):
        chain = Chain([(i, r) for i, r in recipes if name in r.get("sources", (name,))])
        pieces = next(encode_documents(iter([[(1, chain.edit(text))]]), tokenizer))[1]
        ids = np.array([i for piece in pieces for i in piece], dtype=dataset.dtype)
        begin = [] if dataset.begin is None else [dataset.begin]
        wanted = np.concatenate([begin, ids[ids != dataset.end], [dataset.end]])
        for split in dataset.splits:
            stream = dataset.streams(split)[source]
            if stream.is_chat:
                raise DataError(
                    "the dataset has rows of chats, which no file of text names",
                    where=dataset.place,
                    remedy="ask for a dataset of texts",
                )
            starts = stream.document_starts()
            for at in np.flatnonzero(np.diff(starts) == len(wanted)).tolist():
                start, stop = int(starts[at]), int(starts[at + 1])
                if np.array_equal(stream.read(start, stop), wanted):
                    places.append(DocumentPlace(split, source, start, stop, at))
    return places


def find_media(dataset: Dataset, path: Path) -> list[DocumentPlace]:
    """Return where the numbers of an image or a recording lie in a dataset, whatever the text.
    Raises DataError for a file that cannot be decoded."""
    features = FeatureFormat.of_settings(dataset.manifest["settings"]["features"])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable_error(path, error) from None
    wanted = features.make(content, str(path)).view(np.uint8).ravel()
    places = []
    for split in dataset.splits:
        for source, stream in enumerate(dataset.streams(split)):
            starts = stream.document_starts().tolist()
            for at in range(stream.documents):
                if np.array_equal(stream.read_features(at), wanted):
                    places.append(DocumentPlace(split, source, starts[at], starts[at + 1], at))
    return places


def find_reads(
    records: Iterable[Record], batches: FedBatches, places: Iterable[DocumentPlace]
) -> DocumentReads:
    """Return the steps in whose ledger entries a sample of the document stands."""
    length = batches.sequence_length
    samples: dict[int, set[int]] = {}
    for place in places:
        if batches.has_features and place.split == "train":
            samples.setdefault(place.source, set()).add(place.document)
        elif place.split == "train":
            # A window begins at a multiple of S and has S + 1 tokens.
            start = batches.position_of(place.source, place.start)
            stop = start + place.stop - place.start
            first, last = max(0, (start - 1) // length), (stop - 1) // length
            samples.setdefault(place.source, set()).update(range(first, last + 1))
    effective, superseded = lineage.split_effective(records)
    kept, lost = (_steps(part, batches, samples) for part in (effective, superseded))
    return DocumentReads(kept, lost)


def _steps(
    records: Iterable[Record], batches: FedBatches, samples: dict[int, set[int]]
) -> tuple[int, ...]:
    found: set[int] = set()
    for record in records:
        if not isinstance(event := record.event, BatchFed):
            continue
        for value in event.entries:
            entry = LedgerEntry.from_json(event.step, event.rank, value)
            if entry.skip_reason or entry.step in found:
                continue
            source, _, sample = batches.order.places(entry.start, entry.stop)
            if _is_among(source, sample, samples):
                found.add(entry.step)
    return tuple(sorted(found))


def _is_among(
    source: NDArray[np.int64], sample: NDArray[np.int64], samples: dict[int, set[int]]
) -> bool:
    return any(
        bool(np.isin(sample[source == index], list(wanted)).any())
        for index, wanted in samples.items()
    )
