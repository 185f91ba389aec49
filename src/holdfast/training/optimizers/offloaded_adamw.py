"""AdamW on state that does not lie on the device.

The update is that of `train.optimizer.AdamW`, element by element. Each piece of the state comes to
the device for it. So the place of the state changes no bit. With `train.memory.update: host` the
same fused kernel of torch runs on the host, as in ZeRO-Offload (Ren et al., 2021). That moves
gradients and parameters in place of moments. Without an accelerator it changes no bit either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast.config.sections.optimizer import OptimizerConfig, Slot
from holdfast.core.sharding.optimizer_state import ParameterSettings
from holdfast.core.sharding.update_pieces import UpdatePiece, cut_into_pieces
from holdfast.training.memory.piece_stream import PieceStream, StagedTensors
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.optimizer import (
    SlotTensors,
    adamw_of_step,
    group_by_settings,
    merge_buffers,
)


class OffloadedAdamW:
    """As `train.optimizer.AdamW`, with moments, and perhaps parameters and gradients, in the places
    of `memory`."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        settings: Sequence[ParameterSettings],
        config: OptimizerConfig,
        merges: Mapping[int, str],
        memory: StateMemory,
    ):
        self._config, self._memory, self._merges = config, memory, dict(merges)
        self._parameters, self._gradients = list(parameters), list(gradients)
        first = self._parameters[0]
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self._moments = [memory.zeros("optimizer", shapes, first.dtype) for _ in range(2)]
        held = [i for i, p in enumerate(self._parameters) if p.numel() and i not in self._merges]
        groups = group_by_settings(held, settings)
        self._settings = [found for found, _ in groups]
        self._pieces = cut_into_pieces(
            [[(i, self._parameters[i].numel()) for i in indices] for _, indices in groups],
            int(memory.config.piece_mb * 1e6) // first.element_size(),
        )
        self._stream = self._new_stream()

    @property
    def slots(self) -> list[SlotTensors]:
        names = ("exp_avg", "exp_avg_sq")
        return [
            SlotTensors(Slot(name), list(moment))
            for name, moment in zip(names, self._moments, strict=True)
        ]

    @property
    def staged_bytes(self) -> int:
        """Bytes that an update takes for pieces, where it runs."""
        return self._stream.staged_bytes

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        self._stream = self._new_stream()

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """As `AdamW.apply`. Raises StateMemoryError if a file fails; the state is void then."""
        merge_buffers(self._parameters, self._gradients, self._merges, microbatches)
        dtype, memory = self._parameters[0].dtype, self._memory
        device = torch.device("cpu") if memory.updates_on_host else memory.device
        adamw = adamw_of_step(self._config, step, learning_rate, divisor, dtype, device)

        def update(piece: UpdatePiece, staged: list[list[Tensor]]) -> None:
            adamw(self._settings[piece.group], *staged)

        self._stream.run(update)

    def _new_stream(self) -> PieceStream:
        roles = [
            StagedTensors(self._parameters, writes_back=True, kind="parameters"),
            StagedTensors(self._gradients, writes_back=False, kind="gradients"),
            *(StagedTensors(each, writes_back=True, kind="optimizer") for each in self._moments),
        ]
        return PieceStream(self._memory, self._pieces, roles)
