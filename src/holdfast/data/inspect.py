"""Shows a dataset in numbers, and one sample as the model sees it."""

from __future__ import annotations

from typing import Any

from holdfast.data.batch import MASKED_TARGET, Batches
from holdfast.data.dataset import Dataset
from holdfast.data.vocabulary import load_tokenizer

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
    total = batch.targets.size
    return {
        "samples": dict(zip(batches.dataset.source_names, batches.order.sizes, strict=True)),
        "sequence_length": batches.sequence_length,
        "masked_share": 1.0 - batch.tokens / total,
        "documents_per_sample": 1.0
        + float((batch.inputs[:, :-1] == batches.dataset.end).mean())
        * (batches.sequence_length - 1),
    }


def render_sample(batches: Batches, position: int = 0) -> str:
    """Return the text of the sample at one position of the run. Each token is between bars, an end
    of document is on a line of its own, and masked targets are marked."""
    batch = batches.read_samples(position, position + 1)
    tokenizer = load_tokenizer(batches.dataset.tokenizer_path)
    out: list[str] = []
    for token, target in zip(batch.inputs[0].tolist(), batch.targets[0].tolist(), strict=True):
        if token == batches.dataset.end:
            out.append("\n=== end of document (target masked) ===\n")
        else:
            text = tokenizer.decode([token], skip_special_tokens=False)
            out.append(("|" if target != MASKED_TARGET else "|(masked)") + text)
    return "".join(out)
