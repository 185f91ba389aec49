"""A teacher's likeliest tokens at each place of a dataset, stored next to it.

One process computes what the folder lacks, piece by piece (`data/stream/reference.py`). So a kill
costs the piece in work. The complete teacher is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.core.devices import device_kind
from holdfast.data.stream.batch import Batches, Microbatch
from holdfast.data.stream.reference import TEACHER_IDS, TEACHER_LOGPS, ReferencePiece
from holdfast.model.decoder import Decoder

_SAMPLES = 8  # of a pass
Say = Callable[[int, int], None]
"""Pieces that are stored, and how many there are."""


def teach(teacher: Decoder, batches: Batches, temperature: float, device: str, say: Say) -> str:
    """Store what is missing, and return the digest of all pieces. device: kind of it."""
    store = batches.reference
    assert store is not None, "the key says where the pieces lie"
    where = device_kind(device).device(0)
    decoder, present = teacher.to(where), store.present()
    for number, is_there in enumerate(present):
        if not is_there:
            store.write(number, _piece(decoder, batches, store.pieces[number], temperature))
        say(number + 1, len(present))
    return store.finish()


def _piece(
    decoder: Decoder, batches: Batches, piece: ReferencePiece, temperature: float
) -> NDArray[np.void]:
    """[samples, S] records of K ids and log-probabilities, the likeliest first."""
    store = batches.reference
    assert store is not None
    out = np.zeros((piece.stop - piece.start, store.length), dtype=store.dtype)
    count = store.dtype[TEACHER_IDS].shape[0]
    for start in range(piece.start, piece.stop, _SAMPLES):
        stop = min(start + _SAMPLES, piece.stop)
        read = batches.samples_of(ReferencePiece(piece.split, piece.source, start, stop))
        ids, logps = _of_samples(decoder, read, temperature, count)
        rows = out[start - piece.start : stop - piece.start]
        rows[TEACHER_IDS], rows[TEACHER_LOGPS] = ids, logps
    return out


@torch.no_grad()
def _of_samples(
    decoder: Decoder, read: Microbatch, temperature: float, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[B, S, K] each"""
    where = decoder.head_weight.device
    documents = None if read.documents is None else torch.from_numpy(read.documents).to(where)
    hidden = decoder.hidden(torch.from_numpy(read.inputs).to(where), documents)
    parts = [
        likeliest(decoder, row, temperature, count) for row in hidden
    ]  # one's logits at a time
    return np.stack([ids for ids, _ in parts]), np.stack([logps for _, logps in parts])


def likeliest(
    decoder: Decoder, hidden: Tensor, temperature: float, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the likeliest tokens after each place, and their log-probabilities.
    [n, D] -> [n, K] each"""
    logps = (decoder.unembed(hidden).float() / temperature).log_softmax(-1)
    values, ids = logps.topk(count, dim=-1)
    return ids.int().cpu().numpy(), values.cpu().numpy()
