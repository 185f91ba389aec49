"""A teacher that reads the student's completions (on-policy distillation, GKD).

A trainer keeps the teacher, and reads the completions of its own rows while it builds a batch. A
completion is read alone, in a row of `data.sequence_length`, with the threads of one decoding step.
So the likeliest tokens are a function of teacher, prompt and completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.run import RunConfig
from holdfast.data.stream.reference import TEACHER_IDS, TEACHER_LOGPS
from holdfast.model.decoder import Decoder
from holdfast.rollout.decode.threads import serial_kernels
from holdfast.training.compress.teach import likeliest
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.task import open_weights

_PLACES = 256  # whose logits are in memory at a time


class Teacher:
    """Belongs to the loader's thread. decoder: in the precision of its weights."""

    def __init__(self, decoder: Decoder, length: int, temperature: float, count: int) -> None:
        self._decoder, self._length = decoder, length
        self._temperature, self._count = temperature, count

    @staticmethod
    def open(config: RunConfig, device: torch.device) -> Teacher:
        """Load the teacher of a run, in the precision of its passes. Raises ModelFolderError."""
        objective, reference = config.objective, config.objective.reference
        folder, dtype = Path(reference.model), Precision.of(config.train.precision).compute
        model = read_folder_model(folder)
        key = "objective.reference.model"
        tensors = open_weights(model, folder, reference.checksum, key)
        with torch.device("meta"):
            decoder = Decoder(model)
        state = {name: value.to(device, dtype, copy=True) for name, value in tensors.items()}
        decoder.load_state_dict(state, strict=True, assign=True)
        count = min(int(objective.number("top_k")), model.vocab_size)
        length = config.data.sequence_length
        return Teacher(decoder.eval(), length, objective.number("temperature"), count)

    def blank(self, rows: int) -> dict[str, NDArray[np.generic]]:
        """Return side tensors of rows without a target, [rows, S, K] each."""
        shape = rows, self._length, self._count
        return {
            TEACHER_IDS: np.zeros(shape, dtype=np.int32),
            TEACHER_LOGPS: np.zeros(shape, dtype=np.float32),
        }

    @torch.no_grad()
    def read(self, tokens: Sequence[int], first: int) -> dict[str, NDArray[np.generic]]:
        """Return the likeliest tokens in the place of each token from number `first` on, under the
        names of the side tensors. [n, K] each"""
        inputs = np.zeros((1, self._length), dtype=np.int64)
        inputs[0, : len(tokens) - 1] = tokens[:-1]
        where = self._decoder.head_weight.device
        with serial_kernels():
            hidden = self._decoder.hidden(torch.from_numpy(inputs).to(where))[0]
            places = hidden[first - 1 : len(tokens) - 1].split(_PLACES)
            how = self._temperature, self._count
            parts = [likeliest(self._decoder, part, *how) for part in places]
        ids, logps = (np.concatenate(of_parts) for of_parts in zip(*parts, strict=True))
        return {TEACHER_IDS: ids, TEACHER_LOGPS: logps}
