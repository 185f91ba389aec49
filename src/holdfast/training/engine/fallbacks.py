"""Settings that a generation cannot follow everywhere, and how it keeps documents apart: each is
said once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.run_table import run_cells
from holdfast.events import AttentionChosen, AttentionKernel, Event, SettingIgnored
from holdfast.layout import Topology
from holdfast.model.decoder import Decoder
from holdfast.parallel.torch_compat import chosen_attention
from holdfast.training.engine.precision import Precision


class Fallbacks:
    """What one rank looks at in each step, for all of them."""

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        emit: Callable[[Event], None],
        objective: nn.Module,
    ) -> None:
        self._config, self._topology, self._emit = config, topology, emit
        self._decoder = getattr(objective, "decoder", None)
        self._has_looked, self._schedule = False, config.layout.schedule == "1f1b"

    def look(self, step: int, shares: Shares) -> None:
        """shares: how the microbatches of `step` were dealt to the replicas."""
        if not self._has_looked:
            self._has_looked = True
            self._look_once(step)
        for replica, share in zip(self._topology.replicas, shares, strict=True):
            stages = replica.degree("pp")
            if self._schedule and 0 < len(share) < stages:
                self._schedule = False
                why = (
                    f"replica {replica.index} has {len(share)} of the microbatches of step {step}, "
                    f"and 1f1b needs {stages}: such a share runs as gpipe"
                )
                self._emit(SettingIgnored("layout.schedule", why, step=step))

    def _look_once(self, step: int) -> None:
        config, replicas = self._config, self._topology.replicas
        if config.data.attention == "document" and isinstance(self._decoder, Decoder):
            how = self._decoder.document_attention
            self._emit(AttentionChosen(how.way, how.reason, step=step))
        elif isinstance(self._decoder, Decoder):
            self._say_kernel(self._decoder, step)
        if config.layout.reduction == "fast" and not one_sum(config, self._topology):
            why = (
                "fast needs one group of ranks that sums all that a rank computes. This layout has "
                "several, so sums follow the tree"
            )
            self._emit(SettingIgnored("layout.reduction", why, step=step))
        whole = [replica.index for replica in replicas if replica.degree("dp_shard") == 1]
        if config.train.memory.parameters != DEVICE and whole:
            why = f"replica {whole[0]} is not cut by dp_shard: its parameters stay on the device"
            self._emit(SettingIgnored("train.memory.parameters", why, step=step))

    def _say_kernel(self, decoder: Decoder, step: int) -> None:
        """Say which kernel torch takes for this rank's attention, unless it is spread over ranks,
        which compute it themselves."""
        config, model, replica = self._config, self._config.model, self._topology.replicas[0]
        if replica.degree("cp") > 1:
            return
        device = next(decoder.parameters()).device
        length, tp = config.data.sequence_length, replica.degree("tp")
        q, k = (
            torch.empty(
                (1, length, max(1, heads // tp), model.head_size),
                dtype=Precision.of(config.train.precision).compute,
                device=device,
                requires_grad=True,
            ).transpose(1, 2)
            for heads in (model.heads, model.kv_heads)
        )
        is_masked = len(model.windowed) == model.layers
        kernel = (
            "matrix products"  # no fused kernel has the limit
            if model.attention_softcap
            else chosen_attention(q, k, scale=model.attention_scale or None, is_masked=is_masked)
        )
        if kernel:
            self._emit(AttentionKernel(kernel, device.type, step=step))


def one_sum(config: RunConfig, topology: Topology) -> bool:
    """Whether each rank is in one reduction cell, of which each rank contributes and receives:
    then the backend's own all-reduce is the same sum. Replicas of one kind are alike in that."""
    kinds = [next(r for r in topology.replicas if r.kind == kind) for kind in topology.kinds]
    for rank in (rank for replica in kinds for rank in replica.ranks):
        cells = run_cells(config, topology, rank)
        if len(cells) != 1 or not all(m.contributes and m.receives for m in cells[0].members):
            return False
    return True
