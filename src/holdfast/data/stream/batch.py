"""The batch of step N as a pure function of (dataset version, seed, N). numpy only.

A *sample* is a window of S+1 tokens of one source's packed stream. Windows stand S apart, so
each token but the stream's first is a target exactly once. Inputs are the window's first S
tokens and targets its last S:

    stream   a b c # d e f g #         '#' ends a document
    inputs   a b c # d e f g           S = 8
    targets  b c # . e f g #           '.' is masked (-100): the end of one document
                                       says nothing about the next

Rows of chat data are not cut. A sample holds complete rows (`data/order/packing.py`), and its
targets are the tokens that the dataset's mask names. Of preferences, documents 2k and 2k + 1 of a
sample are a pair. It is the chosen and the rejected answer, or a rated answer and its row of the KL
baseline. There each token of a sample is an input.

The last window of a stream is padded with the end token and masked there. Which window stands
at which position of the run is `core/data/sample_order.py`'s to say.

A microbatch that is skipped (`core/data/skips.py`) keeps its positions, but is not read, as it may
be unreadable. End tokens are fed in its place, and every target is masked. So its loss and
its gradient are exactly zero, whatever it would have done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.data.sample_order import (
    BatchSchedule,
    MixChange,
    OrderedPasses,
    SampleOrder,
    SourceEnd,
)
from holdfast.core.data.skips import Skips
from holdfast.core.data.target_weights import add_weights, target_ids, total_weight
from holdfast.core.weights import shortest
from holdfast.data.order.baselines import MAX_TOKENS, TokenCounts, bits_per_byte
from holdfast.data.order.media_samples import MediaSamples
from holdfast.data.order.packing import PackedSamples
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stream.dataset import Dataset, TokenStream
from holdfast.data.stream.prefetch import Prefetch
from holdfast.data.stream.reference import (
    LOGPS,
    TEACHER_IDS,
    TEACHER_LOGPS,
    ReferencePiece,
    ReferenceStore,
    cut_pieces,
    record_type,
    reference_folder,
)
from holdfast.data.stream.shards import ShardFile
from holdfast.errors import DataError

Streams = tuple[TokenStream, ...]
Packed = tuple[PackedSamples | MediaSamples | None, ...]  # for each stream; None: windows of text

REFERENCE = "reference"  # side tensor: log-probabilities under the reference model
FEATURES = "features"  # side tensor: numbers of images or recordings [B, rows, values]
MASKED_TARGET = -100  # torch's cross entropy leaves such targets out
NO_SIDE: Mapping[str, NDArray[Any]] = {}


@dataclass(frozen=True)
class Microbatch:
    """Samples as the model takes them, and what the ledger says of them.

    inputs, targets: int64 [B, S]; with `data.chat.weights` targets have their weights
    (`core.data.target_weights`). documents: int32 [B, S], numbered from 0 in each sample, or
    None if attention does not stop at documents. tokens: targets that carry loss, or the sum of
    their weights; with an objective what that counts. entries: ledger entries as in
    `events.BatchFed`. side: more tensors [B, S] of an objective, aligned with targets, by name.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int32] | None
    entries: list[dict[str, Any]]
    tokens: float
    side: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationSet:
    """Validation samples in fixed order, cut into microbatches; tokens: targets with loss."""

    microbatches: list[Microbatch]
    tokens: float
    tokens_per_byte: float

    @property
    def bytes(self) -> float:
        """Bytes of text that the targets stand for, at the bytes per token of all the split."""
        return self.tokens / self.tokens_per_byte

    def bits_per_byte(self, nats: float) -> float:
        """Loss summed over all targets -> bits per byte of text (defined in `baselines`)."""
        return bits_per_byte(nats / max(self.tokens, 1), self.tokens_per_byte)


class Batches:
    """Every batch of a run, by step number."""

    def __init__(
        self,
        dataset: Dataset,
        data: DataConfig,
        train: TrainConfig,
        seed: int,
        skips: Skips | None = None,
        reference: str = "",
    ):
        """reference: key of reference log-probabilities that samples need; "": none. They are NaN
        until `read_reference` is called."""
        self.dataset = dataset
        self.skips = skips or Skips()
        self.sequence_length = data.sequence_length
        self.microbatch_size = train.microbatch_size
        self.document_attention = data.attention == "document"
        stages = [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
        self.schedule = BatchSchedule(train.batch_size, stages)
        self._long_rows, self._is_weighted = data.chat.long_rows, data.chat.weights
        self._curriculum = data.curriculum
        self._streams = tuple(self._in_order(stream) for stream in dataset.streams("train"))
        self._validated = train.evaluate.sources
        self.has_preferences = any(stream.is_preference for stream in self._streams)
        rated = (stream for stream in self._streams if stream.is_chat and stream.has_values)
        names = {_value_name(stream) for stream in rated}
        self._has_teacher = record_type(reference) != LOGPS
        has_logps = reference and not self._has_teacher
        self.side_names = tuple(sorted(names | ({REFERENCE} if has_logps else set())))
        self._features = dataset.manifest["settings"].get("features")
        self.has_features = bool(self._features)
        self.packed = self._pack(self._streams)
        if self._curriculum.by == "length":
            for rows in self.packed:
                if isinstance(rows, PackedSamples):
                    rows.sort_by_length(self._curriculum.descending)
        # Sources in the dataset's order. Raises DataError when the names differ.
        by_name = {source.mix_name: source for source in data.sources}
        if set(by_name) != set(dataset.source_names):
            raise DataError(
                f"the dataset has the sources {list(dataset.source_names)}, the run file names "
                f"{list(by_name)}",
                where="data.sources",
                remedy="name another data.folder, or remove this one",
            )
        sizes = self._sizes(self._streams, self.packed)
        if min(sizes) < 1:
            place = sizes.index(min(sizes))
            raise self._empty_error(dataset.source_names[place], self._streams[place])
        weights, *changed = (
            tuple(each[name] for name in dataset.source_names) for each in data.mix_weights()
        )
        changes = [
            MixChange(self.schedule.position(stage.from_step), each, f"data.mix.{index}.weights")
            for index, (stage, each) in enumerate(zip(data.mix, changed, strict=True))
        ]
        ends = [
            SourceEnd(size * source.passes, source.at_end) if source.at_end != "repeat" else None
            for source, size in zip(
                (by_name[name] for name in dataset.source_names), sizes, strict=True
            )
        ]
        passes = OrderedPasses(self._curriculum.passes, self._curriculum.window)
        ordered = None if self._curriculum.by == "none" else passes
        self.order = SampleOrder(seed, sizes, weights, changes, ends, ordered)
        self.reference = self._find_reference(reference) if reference else None
        self._prefetch = None
        if dataset.cache is not None:
            fixed, every = self._fixed_files(), {f for s in self._streams for f in s.files}
            for stream in self._streams if self._features else ():
                every.update(stream.feature_files_with(np.arange(stream.documents)))
            count = len(every.union(fixed))
            self._prefetch = Prefetch(dataset.cache, self.files_of, train.steps, fixed, count)

    def fetch_ahead(self, step: int) -> None:
        """Begin to fetch the shards that steps from `step` on read, if the dataset has an
        address."""
        if self._prefetch is not None:
            self._prefetch.reach(step)

    def position_of(self, source: int, start: int) -> int:
        """Return the place in the stream that samples are cut from, of the training document that
        begins at token `start` of a source."""
        return self._streams[source].position(start)

    def _in_order(self, stream: TokenStream) -> TokenStream:
        """Return a stream of text with its documents in the order of `data.curriculum`. Raises
        DataError for a dataset without scores."""
        by = self._curriculum.by
        if by == "none" or stream.is_chat:
            return stream
        scores: NDArray[Any] | None = np.diff(stream.document_starts())
        if by == "score" and (scores := stream.document_values()) is None:
            raise DataError(
                "the dataset has no scores, which data.curriculum asks for",
                where=self.dataset.place,
                remedy="add a stage of kind score to data.stages, and name another data.folder",
            )
        assert scores is not None
        numbers = scores.astype(np.float64)
        return stream.ordered(-numbers if self._curriculum.descending else numbers)

    def _find_reference(self, key: str) -> ReferenceStore:
        sizes = {"train": self._sizes(self._streams, self.packed)}
        if "validation" in self.dataset.splits:
            streams = self.dataset.streams("validation")
            sizes["validation"] = self._sizes(streams, self._pack(streams))
        pieces = cut_pieces(sizes, self.sequence_length)
        store = ReferenceStore(reference_folder(self.dataset, key), pieces, self.sequence_length)
        self._is_reference_read = store.is_complete
        return store

    def read_reference(self) -> None:
        """Read the reference log-probabilities, which are complete from now on."""
        self._is_reference_read = True

    def samples_of(self, piece: ReferencePiece) -> Microbatch:
        """The samples of a piece of reference log-probabilities."""
        is_train = piece.split == "train"
        streams = self._streams if is_train else self.dataset.streams(piece.split)
        packed = self.packed if is_train else self._pack(streams)
        samples = np.arange(piece.start, piece.stop)
        has_teacher, self._has_teacher = self._has_teacher, False  # it is not stored yet
        try:
            return self._gather(streams, packed, np.full(len(samples), piece.source), samples)
        finally:
            self._has_teacher = has_teacher

    def microbatches(self, step: int) -> int:
        """Logical microbatches of a step."""
        return self.schedule.size(step) // self.microbatch_size

    def positions(self, step: int, index: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Positions [start, stop) of part `part` of `parts` of microbatch `index` of a step."""
        return self.schedule.share(self.microbatch_size, step, index, part, parts)

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        """Microbatch `index` (from 0) of a step, or the `part`-th of `parts` equal shares of its
        samples in order (ranks of one dp_shard axis). Its ledger entry holds the hash of its
        own inputs and targets."""
        self.fetch_ahead(step)
        start, stop = self.positions(step, index, part, parts)
        source, _, sample = self.order.places(start, stop)
        why = self.skips.reason(step, index)
        batch = (
            self.blank_microbatch(stop - start)
            if why
            else self._gather(self._streams, self.packed, source, sample)
        )
        used = set(source.tolist())
        name = self.dataset.source_names[used.pop()] if len(used) == 1 else ""
        entry = {
            "microbatch": index,
            "source": name,
            "start": start,
            "stop": stop,
            "hash": fed_hash(batch.inputs, batch.targets, batch.side),
            "skipped": why,
        }
        return replace(batch, entries=[entry])

    def blank_microbatch(self, samples: int) -> Microbatch:
        """Return the replacement of skipped samples: end tokens, of which none is a target."""
        shape = (samples, self.sequence_length)
        inputs = np.full(shape, self.dataset.end, dtype=np.int64)
        targets = np.full(shape, MASKED_TARGET, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32) if self.document_attention else None
        return Microbatch(inputs, targets, documents, [], 0, self._empty_side(samples))

    def _empty_side(self, samples: int) -> dict[str, NDArray[Any]]:
        """Features are as they are stored, but for float16, which becomes float32."""
        side: dict[str, NDArray[Any]] = {
            name: np.zeros((samples, self.sequence_length), np.float32) for name in self.side_names
        }
        if self._features:
            stored = np.dtype(self._features["dtype"])
            dtype = np.dtype(np.float32) if stored.kind == "f" else stored
            side[FEATURES] = np.zeros((samples, *self._features["shape"]), dtype)
        return side

    def blank_hash(self, samples: int) -> str:
        """The ledger hash of so many skipped samples."""
        blank = self.blank_microbatch(samples)
        return fed_hash(blank.inputs, blank.targets, blank.side)

    def hash_of(self, start: int, stop: int) -> str:
        """The ledger hash that feeding positions [start, stop) must give."""
        batch = self.read_samples(start, stop)
        return fed_hash(batch.inputs, batch.targets, batch.side)

    def read_samples(self, start: int, stop: int) -> Microbatch:
        """The samples at positions [start, stop), whatever step they belong to; no ledger."""
        source, _, sample = self.order.places(start, stop)
        return self._gather(self._streams, self.packed, source, sample)

    def validation(self, samples: int) -> ValidationSet:
        """Return the same `samples` windows of the validation split each time, evenly spread over
        it; all of it if it has fewer. They come in microbatches of `microbatch_size`; the last may
        be smaller. Empty without a validation split. Text of sources that `train.evaluate.sources`
        does not name does not count."""
        if "validation" not in self.dataset.splits:
            return ValidationSet([], 0, 1.0)
        streams = self.dataset.streams("validation")
        packed, names = self._pack(streams), self.dataset.source_names
        is_measured = [not self._validated or name in self._validated for name in names]
        sizes = [
            size if measured else 0
            for size, measured in zip(self._sizes(streams, packed), is_measured, strict=True)
        ]
        total = sum(sizes)
        count = min(samples, total)
        chosen = np.arange(count, dtype=np.int64) * total // max(count, 1)
        ends = np.cumsum(sizes)
        source = np.searchsorted(ends, chosen, side="right")
        sample = (chosen - (ends - sizes)[source]).astype(np.int64)
        size = self.microbatch_size
        out = [
            self._gather(streams, packed, source[at : at + size], sample[at : at + size])
            for at in range(0, count, size)
        ]
        tokens = shortest(sum(batch.tokens for batch in out))
        if all(is_measured) or not out:
            return ValidationSet(out, tokens, self.dataset.tokens_per_byte("validation"))
        return ValidationSet(out, tokens, self._tokens_per_byte(out))

    def _tokens_per_byte(self, batches: list[Microbatch]) -> float:
        """Return the text tokens per byte of text of these samples' targets."""
        targets = np.concatenate([target_ids(batch.targets).ravel() for batch in batches])
        ids = targets[(targets != MASKED_TARGET) & (targets != self.dataset.end)]
        tokenizer = load_tokenizer(self.dataset.tokenizer_path)
        text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return len(ids) / max(len(text.encode()), 1)

    def validation_baselines(self, samples: int) -> dict[str, float] | None:
        """Bits per byte of unigram and bigram counts on just the targets of
        `validation(samples)`, to draw next to a curve. None without a validation split, and for
        chat data. Counts the training text: about a second for ten million tokens."""
        if self._features or any(stream.is_chat for stream in self._streams):
            return None
        found = self.validation(samples)
        if not found.tokens:
            return None
        train = (stream.read(0, MAX_TOKENS) for stream in self._streams)
        counts = TokenCounts(train, self.dataset.vocab_size, self.dataset.end)
        before = np.concatenate([m.inputs[m.targets != MASKED_TARGET] for m in found.microbatches])
        after = np.concatenate([m.targets[m.targets != MASKED_TARGET] for m in found.microbatches])
        both = counts.mean_nats(before, after)
        unigram, bigram = (bits_per_byte(nats, found.tokens_per_byte) for nats in both)
        return {"unigram": unigram, "bigram": bigram}

    def files_of(self, step: int) -> list[ShardFile]:
        """The files of text that a step reads, on all nodes together."""
        start, stop = self.schedule.position(step), self.schedule.position(step + 1)
        source, _, sample = self.order.places(start, stop)
        found: list[ShardFile] = []
        for s in np.unique(source).tolist():
            if isinstance(self.packed[s], MediaSamples):
                found += self._streams[s].feature_files_with(sample[source == s])
            elif self.packed[s] is None:
                begins = sample[source == s] * self.sequence_length
                found += self._streams[s].files_with(begins, begins + self.sequence_length + 1)
        return found

    def _fixed_files(self) -> list[ShardFile]:
        """The files of validation, and of chat data, whose rows lie anywhere in them. Of images and
        recordings in training, their texts."""
        splits = self.dataset.splits
        validation = self.dataset.streams("validation") if "validation" in splits else ()
        chat = (s for s, rows in zip(self._streams, self.packed, strict=True) if rows is not None)
        found = [file for stream in (*validation, *chat) for file in stream.files]
        for stream in validation if self._features else ():
            found += stream.feature_files_with(np.arange(stream.documents))
        return found

    def _pack(self, streams: Streams) -> Packed:
        # The last token of a window is no input, and a reward is read at a row's last token.
        room = self.sequence_length + (0 if self.has_preferences else 1)
        if self._features:
            has_begin = self.dataset.begin is not None
            first = np.array([] if has_begin else [self.dataset.end], dtype=self.dataset.dtype)
            return tuple(MediaSamples(stream, room, first) for stream in streams)
        return tuple(
            PackedSamples(stream, room, self._long_rows) if stream.is_chat else None
            for stream in streams
        )

    def _sizes(self, streams: Streams, packed: Packed) -> list[int]:
        """Samples of each stream."""
        return [
            -(-max(stream.tokens - 1, 0) // self.sequence_length) if rows is None else rows.count
            for stream, rows in zip(streams, packed, strict=True)
        ]

    def _empty_error(self, name: str, stream: TokenStream) -> DataError:
        what, remedy = "has less than two tokens of training text", "give it more text"
        if self._features:
            what, remedy = "has no document to train on", "give it more documents"
        if stream.is_chat:
            room = self.sequence_length + (0 if stream.is_preference else 1)
            what = f"has no row of {room} tokens or fewer"
            remedy = "raise data.sequence_length, or set data.chat.long_rows: cut"
        return DataError(f"source {name!r} {what}", where=self.dataset.place, remedy=remedy)

    def _gather(
        self, streams: Streams, packed: Packed, source: NDArray[np.int64], sample: NDArray[np.int64]
    ) -> Microbatch:
        """Windows [n] -> a Microbatch of n samples without a ledger entry."""
        length, end = self.sequence_length, self.dataset.end
        window = np.full((len(source), length + 1), end, dtype=np.int64)
        held = np.empty(len(source), dtype=np.int64)
        ends, carries = {}, {}  # of the rows with chat data
        side = self._empty_side(len(source))
        for row, (s, k) in enumerate(zip(source.tolist(), sample.tolist(), strict=True)):
            if (rows := packed[s]) is not None:
                one = rows.sample(k)
                held[row] = len(one.tokens)
                window[row, : len(one.tokens)] = one.tokens
                ends[row], carries[row] = one.ends, one.mask
                if one.values is not None:
                    values = np.repeat(one.values, one.lengths)[:length]
                    side[_value_name(streams[s])][row, : len(values)] = values
                if FEATURES in side:
                    stored = streams[s].read_features(k).view(self._features["dtype"])
                    side[FEATURES][row] = stored.reshape(side[FEATURES].shape[1:])
                if REFERENCE in side:
                    side[REFERENCE][row] = self._reference_of(streams, s, k)
                continue
            tokens = streams[s].read(k * length, (k + 1) * length + 1)
            held[row] = len(tokens)
            window[row, : len(tokens)] = tokens
        if self._has_teacher:
            side |= self._teacher_side(streams, source, sample)
        inputs = window[:, :-1].copy()
        targets = window[:, 1:].copy()
        ended = inputs == end
        for row, last in ends.items():
            ended[row] = _padded(last, length)
            bytes_of_row = _padded(carries[row][1:], length)
            if self._is_weighted:
                targets[row] = add_weights(targets[row], bytes_of_row)
            targets[row, bytes_of_row == 0] = MASKED_TARGET
        targets[ended | (np.arange(1, length + 1) >= held[:, None])] = MASKED_TARGET
        documents = None
        if self.document_attention:
            documents = np.zeros(inputs.shape, dtype=np.int32)
            np.cumsum(ended[:, :-1], axis=1, out=documents[:, 1:])
        tokens = (
            total_weight(targets) if self._is_weighted else int((targets != MASKED_TARGET).sum())
        )
        return Microbatch(inputs, targets, documents, [], tokens, side)

    def _teacher_side(
        self, streams: Streams, source: NDArray[np.int64], sample: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """[n, S, K] each. Raises DataError if they are not stored."""
        store, split = self.reference, "train" if streams is self._streams else "validation"
        assert store is not None
        pairs = zip(source.tolist(), sample.tolist(), strict=True)
        records = np.stack([store.sample(split, s, k) for s, k in pairs])
        return {name: records[name].copy() for name in (TEACHER_IDS, TEACHER_LOGPS)}

    def _reference_of(self, streams: Streams, source: int, sample: int) -> NDArray[np.float32]:
        """[S]"""
        assert self.reference is not None
        if not self._is_reference_read:
            return np.full(self.sequence_length, np.nan, dtype=np.float32)
        split = "train" if streams is self._streams else "validation"
        return self.reference.sample(split, source, sample)


def _value_name(stream: TokenStream) -> str:
    """What the values of a stream's documents are."""
    return "margin" if stream.rows == "preference" else "label"


def _padded(flags: NDArray[Any], length: int) -> NDArray[Any]:
    """[n] -> [length], the rest zeros"""
    out = np.zeros(length, dtype=flags.dtype)
    out[: len(flags)] = flags[:length]
    return out


def fed_hash(
    inputs: NDArray[np.int64],
    targets: NDArray[np.int64],
    side: Mapping[str, NDArray[Any]] = NO_SIDE,
) -> str:
    """xxh3-64 of the tokens as fed: inputs, then targets, int64 little-endian, row by row. Then
    each side tensor by its name: the name, and its bytes, little-endian."""
    state = xxh3_64(np.ascontiguousarray(inputs, dtype="<i8").data)
    state.update(np.ascontiguousarray(targets, dtype="<i8").data)
    for name in sorted(side):
        array = side[name]
        state.update(name.encode())
        state.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    return state.hexdigest()
