"""Shows a dataset in numbers, and one sample as the model sees it."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.data.target_weights import target_ids
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stages.chat_gate import show_masked
from holdfast.data.stream.batch import MASKED_TARGET, Batches
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
    shown as `chat_gate` shows one."""
    batch = batches.read_samples(position, position + 1)
    tokenizer = load_tokenizer(batches.dataset.tokenizer_path)
    if batches.packed[batches.order.place(position).source] is not None:
        # A packed sample, row by row.
        inputs, targets = batch.inputs[0], target_ids(batch.targets[0])
        assert batch.documents is not None
        edges = np.flatnonzero(np.diff(batch.documents[0])) + 1
        rows = []
        for ids, after in zip(np.split(inputs, edges), np.split(targets, edges), strict=True):
            carried = after != MASKED_TARGET
            if not carried.any():
                continue  # padding
            if carried[-1]:  # its last token is a target only
                ids = np.append(ids, after[-1])
            mask = np.concatenate(([False], carried))[: len(ids)]
            rows.append(show_masked(ids, mask, tokenizer, limit=None))
        return "\n=== next row ===\n".join(rows)
    out: list[str] = []
    for token, target in zip(batch.inputs[0].tolist(), batch.targets[0].tolist(), strict=True):
        if token == batches.dataset.end:
            out.append("\n=== end of document (target masked) ===\n")
        else:
            text = tokenizer.decode([token], skip_special_tokens=False)
            out.append(("|" if target != MASKED_TARGET else "|(masked)") + text)
    return "".join(out)
