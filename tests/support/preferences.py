"""Made-up rows of preferences, packed as documents, with side tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.core.seeds import key_seed
from holdfast.data.stream.batch import MASKED_TARGET, Microbatch
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.training.engine.task import DecoderTask


def preference_rows(
    step: int, leaf: int, size: int, vocabulary: int, length: int, part: int = 0, parts: int = 1
) -> Microbatch:
    """Two pairs in most samples; a sample may have one pair and padding, or a row alone."""
    generator = np.random.default_rng(key_seed(11, "preferences", step, leaf))
    inputs = generator.integers(0, vocabulary, (size, length))
    targets = np.full((size, length), MASKED_TARGET)
    documents = np.zeros((size, length), dtype=np.int32)
    label = np.zeros((size, length), dtype=np.float32)
    for sample in range(size):
        rows = (4, 4, 2, 3)[(sample + leaf) % 4]
        ends = np.sort(generator.choice(np.arange(1, length // 2 - 1), rows, replace=False)) * 2 + 2
        begin = 0
        for row, end in enumerate(ends.tolist()):
            documents[sample, begin:end] = row
            targets[sample, begin : end - 1] = inputs[sample, begin + 1 : end]
            targets[sample, begin : begin + (end - begin) // 3] = MASKED_TARGET
            label[sample, begin:end] = (1, -1, 0, 1)[row]
            begin = end
        documents[sample, begin:] = rows
    reference = generator.uniform(-6, -1, (size, length)).astype(np.float32)
    margin = label * 0.25
    side = {"reference": reference, "label": label, "margin": margin}
    mine = slice(part * size // parts, (part + 1) * size // parts)
    cut = {name: rows[mine] for name, rows in side.items()}
    return Microbatch(inputs[mine], targets[mine], documents[mine], [], 0, cut)


def loaded(read: Microbatch, task: DecoderTask, key: int | None = None) -> TensorMicrobatch:
    """As the loader hands it over."""
    weigh = task.weigher()
    assert weigh is not None
    assert read.documents is not None
    tensors: Any = map(torch.from_numpy, (read.inputs, read.targets, read.documents))
    side = {name: torch.from_numpy(rows) for name, rows in read.side.items()}
    return TensorMicrobatch(*tensors, [], weigh(read), key, side)
