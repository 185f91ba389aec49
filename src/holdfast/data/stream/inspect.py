"""Shows a dataset in numbers, and one sample as the model sees it."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.data.target_weights import target_ids
from holdfast.data.order.packing import PackedSamples
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stages.chat_gate import ShownDocument, titles
from holdfast.data.stream.batch import FEATURES, MASKED_TARGET, Batches, Microbatch
from holdfast.data.stream.dataset import Dataset

MASK_SAMPLES = 256


def dataset_numbers(dataset: Dataset) -> dict[str, Any]:
    """Version, vocabulary, baselines; counts per split and per source. JSON-safe."""
    splits = {}
    for split in dataset.splits:
        counts = dict(dataset.counts(split))
        by_source = {
            name: {"documents": stream.documents, "tokens": stream.tokens}
            for name, stream in zip(dataset.source_names, dataset.streams(split), strict=True)
        }
        splits[split] = {
            **counts,
            "bytes_per_token": 1.0 / dataset.tokens_per_byte(split),
            "sources": by_source,
        }
    return {
        "version": dataset.version,
        "vocab_size": dataset.vocab_size,
        "end_token": dataset.manifest["tokenizer"]["end_token"],
        "splits": splits,
        "sources": [
            {**source, "path": path}
            for source, path in zip(dataset.manifest["sources"], dataset.source_paths, strict=True)
        ],
        "baselines": dataset.baselines,
        "shards": len(dataset.shards()),
    }


def mask_shares(batches: Batches) -> dict[str, Any]:
    """Samples per source, and the share of targets that carry no loss (ends of documents and
    padding) among the first samples of the run."""
    start, stop = 0, min(MASK_SAMPLES, sum(batches.order.sizes))
    batch = batches.read_samples(start, stop)
    documents = 1.0
    if batch.documents is not None:
        documents = float(batch.documents.max(axis=1).mean()) + 1.0
    else:
        ends = float((batch.inputs[:, :-1] == batches.dataset.end).mean())
        documents = 1.0 + ends * (batches.sequence_length - 1)
    return {
        "samples": dict(zip(batches.dataset.source_names, batches.order.sizes, strict=True)),
        "sequence_length": batches.sequence_length,
        "masked_share": float((batch.targets == MASKED_TARGET).mean()),
        "documents_per_sample": documents,
    }


def render_sample(batches: Batches, position: int = 0) -> str:
    """Return the text of the sample at one position of the run. Each token is between bars, an end
    of document is on a line of its own, and masked targets are marked. Of chat data, each row is
    shown as `chat_gate` shows one. Of an image or a recording, its text is shown."""
    batch = batches.read_samples(position, position + 1)
    source = batches.order.place(position).source
    if isinstance(batches.packed[source], PackedSamples):
        return _render_rows(batches, batch, batches.dataset.streams("train")[source].rows)
    tokenizer = load_tokenizer(batches.dataset.tokenizer_path)
    if FEATURES in batch.side:
        numbers, ids = batch.side[FEATURES][0], batch.targets[0]
        ids = ids[(ids != MASKED_TARGET) & (ids != batches.dataset.end)]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return f"features: {numbers.dtype} {list(numbers.shape)}\n{text}"
    out: list[str] = []
    for token, target in zip(batch.inputs[0].tolist(), batch.targets[0].tolist(), strict=True):
        if token == batches.dataset.end:
            out.append("\n=== end of document (target masked) ===\n")
        else:
            text = tokenizer.decode([token], skip_special_tokens=False)
            out.append(("|" if target != MASKED_TARGET else "|(masked)") + text)
    return "".join(out)


def _render_rows(batches: Batches, batch: Microbatch, rows: str) -> str:
    """A packed sample, document by document."""
    tokenizer = load_tokenizer(batches.dataset.tokenizer_path)
    inputs, targets = batch.inputs[0], target_ids(batch.targets[0])
    assert batch.documents is not None
    edges = np.flatnonzero(np.diff(batch.documents[0])) + 1
    values = next((batch.side[name][0] for name in ("label", "margin") if name in batch.side), None)
    shown: list[str] = []
    named: list[str] = []
    starts = [0, *edges.tolist()]
    for start, ids, after in zip(
        starts, np.split(inputs, edges), np.split(targets, edges), strict=True
    ):
        carried = after != MASKED_TARGET
        if not carried.any():
            continue  # padding
        if carried[-1]:  # its last token is a target only
            ids = np.append(ids, after[-1])
        mask = np.concatenate(([False], carried))[: len(ids)]
        named = named or titles(rows, [] if values is None else [float(values[start])])
        shown.append(ShownDocument(ids, mask, named.pop(0)).show(tokenizer, limit=None))
    return "\n=== next row ===\n".join(shown)
