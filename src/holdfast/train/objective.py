"""Next-token cross entropy as a sum over tokens, without a float32 copy of all logits.

The loss of a microbatch is the *sum* over its tokens: sums of any split of the batch add up, and
the step divides once by the global token count. Targets of -100 carry no loss.

Logits are the largest tensor of a small model and of a large vocabulary alike, so the head, the
softmax and both of their gradients are computed chunk by chunk over tokens, in one go: for a
chunk, d loss / d logits = softmax(logits) - onehot(target), from which the gradients of hidden
states and head follow at once (the fusion of Liger Kernel, Hsu et al., 2024, section 3.2). It
costs the same three matrix products as the plain form and holds [chunk, V] instead of [B*S, V].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.decoder import Decoder

IGNORED = -100

_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # logits held at a time


class NextToken(nn.Module):
    """A decoder and its training objective: tokens and targets to a loss sum.

    The loss is inside the module so that one forward covers everything that a sharded model
    must gather.
    """

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens, targets, documents: [B, S] -> loss sum: float64 scalar"""
        hidden = self.decoder.hidden(tokens, documents)  # [B, S, D]
        head = self.decoder.head
        weight = self.decoder.embed.weight if head is None else head.weight
        return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten())


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits are held at a time: a function of the model and the device kind, not
    of any layout, because it decides the order of additions in the head's gradient."""
    limit = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"])
    return max(64, limit // vocabulary)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """Sum of -log softmax(hidden weight^T)[target], in float64, over targets that are not -100.

    hidden: [T, D], weight: [V, D], targets: [T] int64 -> scalar. The softmax is taken in at least
    float32. `chunk` tokens at a time; by default what `chunk_tokens` says.
    """
    size = chunk or chunk_tokens(weight.shape[0], hidden.device)
    out: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, size
    )
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass; the backward only scales what the forward found."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        weight_gradient: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk):
            h, t = hidden[start : start + chunk], targets[start : start + chunk]  # [c, D], [c]
            log_p = _log_softmax(F.linear(h, weight))  # [c, V]
            carried = t != IGNORED
            index = t.clamp_min(0)[:, None]  # [c, 1]
            losses = log_p.gather(1, index)[:, 0].masked_fill(~carried, 0.0)
            total -= losses.sum(dtype=torch.float64)
            if hidden_gradient is None:
                continue
            g = log_p.exp_().scatter_add_(1, index, log_p.new_full((1, 1), -1.0).expand_as(index))
            g = _zero_rows(g, ~carried).to(weight.dtype)  # [c, V]: d loss / d logits
            torch.mm(g, weight, out=hidden_gradient[start : start + chunk])
            if weight_gradient is None:
                weight_gradient = g.T @ h
                if hidden.shape[0] > chunk:  # several chunks add up in at least float32
                    weight_gradient = weight_gradient.to(log_p.dtype)
            elif weight_gradient.dtype == weight.dtype:
                weight_gradient.addmm_(g.T, h)
            else:
                weight_gradient.add_(g.T @ h)
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if scale.device.type == "cpu" and scale.item() == 1.0:  # the rule; no pass over memory
            return hidden_gradient, weight_gradient, None, None
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            weight_gradient * scale.to(weight_gradient.dtype),
            None,
            None,
        )


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least.  [c, V] -> [c, V], a new tensor"""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return F.log_softmax(logits, dim=-1, dtype=wide)


def _zero_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Zero the rows [c] of a [c, V] tensor in place.

    On the CPU only those are touched; on an accelerator that would wait for their number.
    """
    if tensor.device.type == "cpu":
        return tensor.index_fill_(0, rows.nonzero()[:, 0], 0.0)
    return tensor.masked_fill_(rows[:, None], 0.0)
