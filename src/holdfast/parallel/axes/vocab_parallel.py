"""Embedding and cross entropy over a vocabulary that is cut by rows.

Each rank holds some rows of the embedding and of the head (Shoeybi et al. 2019, section 3). The
embedding of a token whose row is elsewhere is zero here, and the sum over ranks is the embedding. A
rank computes the logits of its own rows. Ranks exchange two numbers for each token, never the
logits. These are the logarithm of the sum of exponentials and the logit of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.sharding_table import sharding_table, tp_part
from holdfast.model.decoder import Embedding
from holdfast.parallel.comm.collectives import Collectives


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The tokens [first, first + rows), of `vocabulary` in all, that a rank answers for. It may
    hold more rows than these, after them: padding, or rows that another rank answers for."""

    first: int
    rows: int
    vocabulary: int

    @staticmethod
    def of(model: ModelConfig, tp: int, index: int) -> VocabularyPart:
        """Of tp rank `index`; may be empty."""
        units = sharding_table(model)["embed.weight"].tp_units
        first, rows = tp_part(units, tp, index)
        if index and rows and tp_part(units, tp, index - 1) == (first, rows):
            rows = 0  # a vocabulary smaller than tp: the first holder of a row answers for it
        rows = max(0, min(rows, model.vocab_size - first))
        return VocabularyPart(first, rows, model.vocab_size)

    def local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers here, any valid one for a token that is elsewhere; and which are here."""
        index = tokens - self.first
        here = (index >= 0) & (index < self.rows)
        return index.clamp(0, max(self.rows - 1, 0)), here


class VocabularyEmbedding(Embedding):
    """An embedding of the rows of one rank; zero for a token whose row is elsewhere."""

    def __init__(self, whole: Embedding, part: VocabularyPart):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = whole.weight.shape
        self.padding_idx = self.max_norm = None
        self.scale_grad_by_freq = self.sparse = False
        self.weight = whole.weight
        self.part = part

    def forward(self, input: Tensor) -> Tensor:
        """tokens: [B, S] -> [B, S, D], to be summed over ranks"""
        if self.part.rows == 0:  # still a function of the weight, whose gradient is zero
            nothing = self.weight.sum() * 0
            return nothing.expand(*input.shape, self.weight.shape[1])
        index, here = self.part.local_rows(input)
        return F.embedding(index, self.weight).masked_fill(~here[..., None], 0.0)


class VocabularySoftmax:
    """Cross entropy and its slope, each rank given the logits of its own rows."""

    def __init__(self, part: VocabularyPart, collectives: Collectives):
        self.part, self._collectives = part, collectives

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: [c, rows], targets: [c], of all ranks' tokens -> losses [c], equal on each

        Targets below 0 carry no loss.
        """
        return self._combine(_widen(logits).softmax(-1), logits, targets)[0]

    def losses_and_gradient(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-> losses [c], and d loss / d logits of this rank's rows [c, rows]"""
        p = _widen(logits).softmax(-1)  # over this rank's rows
        losses, share = self._combine(p, logits, targets)
        g = p.mul_(share[:, None])
        if self.part.rows:
            index, here = self.part.local_rows(targets)
            g.scatter_add_(1, index[:, None], here.to(g.dtype).neg_()[:, None])
        return losses, g.to(logits.dtype)

    def entropies(self, logits: Tensor) -> Tensor:
        """Of the softmax over all ranks' rows, in nats.  logits: [c, rows] -> [c]"""
        return self._entropies(_widen(logits))[0]

    def entropy_gradient(self, logits: Tensor) -> Tensor:
        """d entropy / d logits of this rank's rows.  [c, rows] -> [c, rows]"""
        wide = _widen(logits)
        entropy, total = self._entropies(wide)
        log_p = wide - total[:, None]
        return log_p.exp().mul_(log_p + entropy[:, None]).neg_()

    def _entropies(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Return entropies [c], and the logarithm of the sum of all ranks' exponentials [c]."""
        own = wide.new_zeros(1, 2, wide.shape[0])
        log_sum, mean = own[0]
        log_sum.fill_(-torch.inf)
        if self.part.rows:
            log_sum.copy_(wide.logsumexp(-1))
            mean.copy_((wide.softmax(-1) * wide).sum(-1))
        everywhere = self._collectives.all_gather(own)  # [n, 2, c]
        total = everywhere[:, 0].logsumexp(0)
        shares = (everywhere[:, 0] - total).exp()
        return total - (shares * everywhere[:, 1]).sum(0), total

    def _combine(self, p: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses [c] and this rank's share [c] of all probability. p: softmax over this
        rank's rows [c, rows]. The share is 0 if the token carries no loss."""
        own = p.new_empty(1, 2, p.shape[0])
        log_sum, logit = own[0]
        if self.part.rows:
            top, at = p.max(-1, keepdim=True)  # top is exp(largest - log_sum)
            log_sum.copy_((logits.gather(1, at).to(p.dtype) - top.log())[:, 0])
            index, here = self.part.local_rows(targets)
            picked = logits.gather(1, index[:, None])[:, 0].to(p.dtype)
            logit.copy_(picked.masked_fill(~here, 0.0))
        else:
            log_sum.fill_(-torch.inf)
            logit.zero_()
        everywhere = self._collectives.all_gather(own)  # [n, 2, c]
        total = everywhere[:, 0].logsumexp(0)
        silent = targets < 0
        losses = (total - everywhere[:, 1].sum(0)).masked_fill_(silent, 0.0)
        return losses, (log_sum - total).exp_().masked_fill_(silent, 0.0)


def _widen(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()
