"""Describes a run's use of its dataset before it starts: passes over the data, and validation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from holdfast.config.sections.data import CurriculumConfig, DataConfig
from holdfast.config.sections.train import EvaluateConfig, TrainConfig
from holdfast.data.order.media_samples import MediaSamples
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.node_cache import total_bytes

MOST = 0.5
"""A source with this share of the samples, or a larger one, makes most of the training."""
MANY_PASSES = 30
"""Passes over the data from which a run repeats it instead of learning from it. Published runs on
repeated text gain next to nothing after 16."""
FEW_PASSES = 4
"""Passes that a remedy names: they teach nearly as much as new text does."""
USUAL_DECAY, MORE_DECAY = 0.1, (0.8, 3.2)
"""Weight decay of runs that see each text once, and what runs with more passes should try. Kim et
al. (2025, arXiv 2509.14786) find 30 times the usual one best for repeated text."""

DECOUPLED = ("adamw", "lion", "muon")
"""Optimizers whose weight decay is apart from the gradient."""


def describe_use(
    dataset: Dataset, data: DataConfig, train: TrainConfig, seed: int = 1
) -> list[str]:
    """Lines for the start of a run. Raises DataError if a source has too little text."""
    batches = Batches(dataset, data, train, seed)
    return [
        _describe_passes(batches, train.steps),
        *_describe_mix(batches, train.steps),
        *_describe_curriculum(batches, data.curriculum, train.steps),
        *_too_many_passes(batches, train),
        *_too_little_decay(batches, train),
        *_larger_than_the_data(batches, train),
        *_describe_packing(batches),
        *_missing_validation(batches, train),
        *_describe_cache(dataset),
    ]


def describe_long_rows(
    dataset: Dataset, data: DataConfig, train: TrainConfig, seed: int = 1
) -> list[str]:
    """Lines about rows and documents that are longer than a sample. Raises DataError if a source
    has too little text."""
    batches = Batches(dataset, data, train, seed)
    return [*_describe_packing(batches), *_describe_long_documents(batches)]


def _describe_long_documents(batches: Batches) -> Iterator[str]:
    """The documents of text that do not fit in one sample."""
    room, names = batches.sequence_length, batches.dataset.source_names
    for name, stream in zip(names, batches.dataset.streams("train"), strict=True):
        lengths = np.diff(stream.document_starts())
        if not (stream.is_chat or stream.has_features) and (count := int((lengths > room).sum())):
            yield (
                f"{name}: {count:,} of {len(lengths):,} documents are longer than "
                f"data.sequence_length {room}, so each is split over several samples"
            )


def _describe_cache(dataset: Dataset) -> Iterator[str]:
    """Whether this node has room for a dataset with an address."""
    if dataset.cache is None:
        return
    size = total_bytes(dataset.files())
    if size > dataset.cache.limit:
        yield (
            f"data.cache_gb has room for {dataset.cache.limit / size:.0%} of the dataset: this "
            "node will fetch shards again and again; if its disk has room, use "
            f"data.cache_gb={math.ceil(size / 1e8) / 10:g}"
        )


def _describe_packing(batches: Batches) -> Iterator[str]:
    """The rows of chat data in a sample, and those that are too long for one."""
    room = batches.sequence_length + 1
    streams = batches.dataset.streams("train")
    for name, rows, stream in zip(
        batches.dataset.source_names, batches.packed, streams, strict=True
    ):
        if isinstance(rows, MediaSamples):
            if rows.cut:
                yield (
                    f"{name}: {rows.cut:,} of {rows.count:,} texts are longer than "
                    f"data.sequence_length {batches.sequence_length} and are cut"
                )
            continue
        if rows is None:
            continue
        what = "pairs" if stream.rows == "preference" else "rows"
        full = rows.tokens / (rows.count * room)
        yield (
            f"{name}: {len(rows.rows):,} {what} in {rows.count:,} samples, which they fill to "
            f"{full:.0%}"
        )
        if rows.left_out or rows.cut:
            yield (
                f"{name}: longer than data.sequence_length {batches.sequence_length}: "
                f"{rows.left_out:,} {what} are left out and {rows.cut:,} cut (data.chat.long_rows)"
            )


def _describe_passes(batches: Batches, steps: int) -> str:
    """How often the run reads each source."""
    last = batches.schedule.position(steps + 1)
    order = batches.order
    passes = [order.count_before(source, last) / size for source, size in enumerate(order.sizes)]
    word = "step" if steps == 1 else "steps"
    what = f"{steps:,} {word} of {batches.sequence_length:,} tokens a sample: {last:,} samples"
    names = batches.dataset.source_names
    if len(names) == 1:
        return f"{what}, {passes_text(passes[0])} over the data ({order.sizes[0]:,} samples)"
    each = ", ".join(f"{name} {passes_text(n)}" for name, n in zip(names, passes, strict=True))
    return f"{what}; over the data: {each}"


def _describe_mix(batches: Batches, steps: int) -> Iterator[str]:
    """Each change of the weights, and of the sources that there are, with its step."""
    last, names = batches.schedule.position(steps + 1), batches.dataset.source_names
    for part in batches.order.parts[1:]:
        if part.start >= last:
            return
        step = bisect_right(range(2, steps + 2), part.start, key=batches.schedule.position) + 1
        shares = ", ".join(
            f"{name} {count / part.mixture.block:.1%}"
            for name, count in zip(names, part.mixture.counts, strict=True)
        )
        ended = "" if part.ended is None else f", where {names[part.ended]} ends"
        yield f"from step {step:,}, sample {part.start:,}{ended}: {shares}"


def _describe_curriculum(
    batches: Batches, curriculum: CurriculumConfig, steps: int
) -> Iterator[str]:
    """The order of documents, and what of a source never comes."""
    if curriculum.by == "none":
        return
    words = ("longest", "shortest") if curriculum.by == "length" else ("highest", "lowest")
    last, order = batches.schedule.position(steps + 1), batches.order
    passes = "the first pass" if curriculum.passes == 1 else f"the first {curriculum.passes} passes"
    yield (
        f"data.curriculum: documents by {curriculum.by}, the "
        f"{words[0 if curriculum.descending else 1]} first, in {passes} over each source"
    )
    for source, name in enumerate(batches.dataset.source_names):
        if 0 < (count := order.count_before(source, last)) < order.sizes[source]:
            yield (
                f"{name}: in this order the run reads the first {count / order.sizes[source]:.0%}, "
                "and never the rest"
            )


def _too_many_passes(batches: Batches, train: TrainConfig) -> Iterator[str]:
    """A warning for a run of which nearly all tokens are repetitions."""
    order, last = batches.order, batches.schedule.position(train.steps + 1)
    if train.epochs or last < MANY_PASSES * sum(order.sizes):
        return
    has = batches.dataset.counts("train")["tokens"]
    fewer = max(1, train.steps * FEW_PASSES * sum(order.sizes) // last)
    yield (
        f"the dataset has {has:,} tokens, and the run trains on {last * batches.sequence_length:,}"
        f": it repeats them; add text, or use train.steps={fewer}"
    )


def _too_little_decay(batches: Batches, train: TrainConfig) -> Iterator[str]:
    """A line for a run that repeats text with the weight decay of a run that does not."""
    passes = batches.schedule.position(train.steps + 1) / sum(batches.order.sizes)
    decay, is_chat = train.optimizer.weight_decay, any(batches.packed)
    is_decoupled = train.optimizer.name in DECOUPLED
    if is_chat or passes <= FEW_PASSES or decay > USUAL_DECAY or not is_decoupled:
        return
    tried = " and ".join(f"{value:g}" for value in MORE_DECAY)
    yield (
        f"{passes_text(passes)} with train.optimizer.weight_decay {decay:g}: the validation loss "
        f"may rise again; compare short runs with {tried}"
    )


def _larger_than_the_data(batches: Batches, train: TrainConfig) -> Iterator[str]:
    """A line for a step that takes more samples than there are."""
    samples = sum(batches.order.sizes)
    if samples < train.batch_size:
        yield (
            f"a step takes {train.batch_size} samples and the data has {samples}: a smaller "
            "train.batch_size makes more steps of it"
        )


def passes_text(passes: float) -> str:
    """Return a number of passes in words."""
    text = f"{passes:.2f}" if passes < 10 else f"{passes:,.0f}"
    return f"{text} passes" if text != "1.00" else "1 pass"


def _missing_validation(batches: Batches, train: TrainConfig) -> Iterator[str]:
    """What the validation set lacks, and what to do."""
    dataset = batches.dataset
    every = train.evaluate.every
    asked = f"train.evaluate.every {every}" if every else "the evaluation at the end"
    if not batches.validation(train.evaluate.samples).tokens:
        documents = dataset.counts("train")["documents"]
        if dataset.manifest["settings"]["validation_fraction"] == 0:
            if every in (0, EvaluateConfig.model_fields["every"].default):
                return  # the run file asks for no validation
            why, remedy = "data.validation_fraction is 0", "set it to 0.01 or so"
        elif documents == 1:
            why = "the dataset is one document, which is trained on"
            remedy = "cut it into several documents (files, or lines of kind: jsonl)"
        elif "validation" in dataset.splits:
            why, remedy = "its documents have no two tokens", "raise data.validation_fraction"
        else:
            why = f"all {documents:,} documents are trained on"
            remedy = "raise data.validation_fraction, or add documents"
        yield (
            f"the validation set is empty ({why}), so {asked} never comes; to validate, {remedy} "
            "and name another data.folder"
        )
        return
    last = batches.schedule.position(train.steps + 1)
    if train.evaluate.sources:
        return  # the run file says what is measured
    for source, stream in enumerate(dataset.streams("validation")):
        name, count = dataset.source_names[source], batches.order.count_before(source, last)
        share = count / last
        if count + 1 > MOST * last and stream.tokens < 2:
            yield (
                f"source {name!r} makes {share:.0%} of the training. The validation set has "
                f"nothing of it; cut {name!r} into more documents or raise "
                "data.validation_fraction, and name another data.folder"
            )
