"""Next-token cross entropy as a sum over tokens, without a float32 copy of all logits.

The loss of a microbatch is the *sum* over its tokens. Sums of any split of the batch add up, and
the step divides once by the global token count. Targets of -100 carry no loss.

Logits are the largest tensor of a small model and of a large vocabulary alike. So the head, the
softmax and both of their gradients are computed chunk by chunk over tokens, in one go. For a
chunk, d loss / d logits = softmax(logits) - onehot(target). The gradients of hidden states and
head follow from it at once (the fusion of Liger Kernel, Hsu et al., 2024, section 3.2). It
costs the same three matrix products as the plain form and holds [chunk, V] instead of [B*S, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.data.target_weights import ID_BITS, PER_ONE, SHIFT
from holdfast.core.devices import device_kind
from holdfast.core.sharding.sharding_table import tp_part
from holdfast.data.stream.reference import TEACHER_IDS, TEACHER_LOGPS
from holdfast.model.decoder import Decoder, soft_limit
from holdfast.model.stage import StagePart
from holdfast.parallel.axes.context import ContextParallel, TokenShare
from holdfast.parallel.axes.tensor_parallel import TensorParallel
from holdfast.parallel.axes.vocab_parallel import VocabularySoftmax
from holdfast.training.objectives.distill import Distill
from holdfast.training.objectives.protocol import Objective, Side
from holdfast.training.objectives.rows import IGNORED_TARGET as IGNORED_TARGET

NO_SIDE: Side = {}

LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [c, V], targets [c]) -> losses [c], and d loss / d logits [c, V] in the logits' dtype."""

Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits [c, V], targets [c]) -> losses [c]"""


class NextTokenObjective(nn.Module):
    """A decoder and its training objective: tokens and targets to a loss sum.

    The loss is inside the module so that one forward covers everything that a sharded model
    must gather. compiled: torch's compiler fuses the softmax and its gradient (not that of a
    vocabulary that is cut, whose ranks talk in the midst of it). weighted: targets may have
    weights (`core.data.target_weights`). chunk: `train.loss_chunk`.

    loss: a function of log-probabilities instead of the next token's cross entropy
    (`training/objectives`). The forward then returns its loss, and the sums of `sum_names`, as one
    vector. temperature: the logits of such a loss are divided by it. gives_log_probabilities: the
    forward returns those of the targets instead [B, S].

    tensor: set by `apply_tensor_parallel` where the decoder is one rank's part of tensor
    parallelism. context: set where a rank has a part of the tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        compiled: bool = False,
        weighted: bool = False,
        chunk: int | str = "auto",
        loss: Objective | None = None,
    ):
        super().__init__()
        self._chunk, self.loss, self.temperature = chunk, loss, 1.0
        self.gives_log_probabilities = False
        self.decoder = decoder
        self._is_weighted = weighted
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self._loss_and_gradient: LossAndGradient = (
            torch.compile(loss_and_gradient) if compiled else _loss_and_gradient_in_place
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        side: Side = NO_SIDE,
        incoming: Tensor | None = None,
        part: StagePart | None = None,
    ) -> Tensor:
        """tokens, targets, documents, side: [B, S] -> loss sum: float64 scalar

        On a pipeline stage that is not the first, `incoming` [B, S, D] is the residual stream of
        the stage before. A stage that is not the last returns its own instead of a loss. (Its
        shape over several tp ranks: `parallel.tensor_parallel.residual_shape`.) Over several cp
        ranks, it is that of this rank's tokens, and a loss is that of all tokens. part: the stage
        to run, if this rank has several.
        """
        decoder, tensor, x, share = self.decoder, self.tensor, incoming, None
        if self.context is not None:
            share = TokenShare(self.context, tokens, targets, documents)
            tokens, targets = share.tokens, share.targets
        if tensor is not None:
            tensor.begin_forward(*tokens.shape)
        if x is None:
            x = decoder.embed_tokens(tokens)  # [B, S, D]
        here = slice(0, len(tokens)) if tensor is None else tensor.attention_samples(len(tokens))
        context = (
            decoder.attention_context(
                tokens[here], x, None if documents is None else documents[here]
            )
            if share is None
            else share.attention_context(decoder, x, here)
        )
        x = decoder.blocks(x, context, positions=None if part is None else part.blocks)
        if decoder.norm is None or (part is not None and not part.is_last):
            return x
        hidden = decoder.head_input(decoder.norm(x))
        if tensor is not None:
            hidden = tensor.enter_region(hidden)
        if self.gives_log_probabilities:
            return self._log_probabilities(hidden, targets)[0]
        if isinstance(self.loss, Distill):
            return self._loss_of_logits(self.loss, hidden, targets, documents, side)
        if self.loss is not None:
            return self._loss_of(self.loss, hidden, targets, documents, side)
        ids, scale = targets.flatten(), None
        if self._is_weighted:
            dtype = _wide_dtype(hidden.dtype)
            # Targets: int64 [T] -> (token ids, or what is below 0; what each counts, in `dtype`)
            hundredths = ids >> SHIFT
            weights = torch.where(hundredths > 0, hundredths.to(dtype) / PER_ONE, 1.0)
            ids, scale = torch.where(ids < 0, ids, ids & ID_BITS), weights.to(dtype)
        loss = self._cross_entropy(hidden, ids, scale)
        return loss if self.context is None else self.context.whole.reduce(loss)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The names of what follows the loss in the forward's vector."""
        return () if self.loss is None else self.loss.names

    def _cross_entropy(self, hidden: Tensor, ids: Tensor, scale: Tensor | None) -> Tensor:
        """hidden: [B, S, D], ids: [B * S] and what each counts -> float64 scalar"""
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.decoder.head_weight,
            ids,
            self._chunk,
            scale=scale,
            slope=self._loss_and_gradient,
            **self._head_keywords(),
        )

    def _head_keywords(self) -> dict[str, Any]:
        """How the head's logits become losses."""
        model = self.decoder.config
        return {
            "vocabulary": model.vocab_size,
            "part": None if self.tensor is None else self.tensor.softmax,
            "softcap": model.logit_softcap,
        }

    def _loss_of(
        self,
        objective: Objective,
        hidden: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        side: Side,
    ) -> Tensor:
        """hidden: [B, S, D] -> [1 + 2 * names] float64: the loss, and a sum and a count of each
        name. Only the loss has a gradient.

        The objective's gradient with respect to the log-probabilities is what each target counts
        in a second pass of the head."""
        assert documents is not None, "the run file's rules ask for documents"
        is_trained = torch.is_grad_enabled() and hidden.requires_grad
        has_words = self.decoder.config.has_language_head
        logps = torch.zeros_like(targets, dtype=_wide_dtype(hidden.dtype))
        values, given = self._values(hidden), dict(side)
        if has_words:
            hidden = hidden if self.temperature == 1.0 else hidden / self.temperature
            logps, *more = self._log_probabilities(hidden, targets, objective.needs_entropy)
            given |= dict(zip(("entropies",), more, strict=False))
        leaves = [logps] * has_words
        if has_words and objective.trains_entropy:
            leaves.append(given["entropies"])
        missing = objective.needs - given.keys()
        given |= {name: torch.zeros_like(logps) for name in missing}  # if it is skipped
        if values is not None:
            given["values"] = values.detach()
            leaves.append(given["values"])
        for leaf in leaves:
            leaf.requires_grad_(is_trained)
        with torch.set_grad_enabled(is_trained):
            found = objective(logps, targets, documents, given)
        words = [found.total.detach()]
        for name in objective.names:
            words += [word.detach().double() for word in found.sums[name]]
        said = torch.stack(words)
        if not is_trained:
            return said
        slopes = list(torch.autograd.grad(found.total, leaves, materialize_grads=True))
        carrier = torch.zeros((), dtype=torch.float64, device=hidden.device)
        if has_words and objective.trains_entropy:
            counts = -slopes.pop(0).flatten(), slopes.pop(0).flatten()
            carrier = self._with_entropy(hidden, targets.flatten(), *counts)
        elif has_words:
            carrier = self._cross_entropy(hidden, targets.flatten(), -slopes.pop(0).flatten())
        if values is not None:
            carrier = carrier + (values * slopes.pop()).sum(dtype=torch.float64)
        out: Tensor = _Reported.apply(carrier, said)  # type: ignore[no-untyped-call]
        return out

    def _with_entropy(
        self, hidden: Tensor, ids: Tensor, scale: Tensor, of_entropy: Tensor
    ) -> Tensor:
        """Return a scalar with the gradient of the cross entropy and of the entropy of each
        target's distribution. hidden: [B, S, D]; ids, and what each of the two counts: [B * S]"""
        part = None if self.tensor is None else self.tensor.softmax
        of_losses = self._loss_and_gradient if part is None else part.losses_and_gradient
        of_entropies = _entropy_gradient if part is None else part.entropy_gradient

        def slope(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            bonus = of_entropies(logits) * of_entropy[at, None]  # before `logits` may be reused
            losses, g = of_losses(logits, ids[at])
            return losses, (bonus + g * scale[at, None]).to(logits.dtype)

        def losses(logits: Tensor, at: Tensor) -> Tensor:
            raise NotImplementedError("a loss without a gradient has no second pass")

        return self._carry(hidden, losses, slope)

    def _carry(self, hidden: Tensor, losses: Losses, slope: LossAndGradient) -> Tensor:
        """Return the sum of losses, float64, whose gradient is found with them. The functions get
        logits [c, V] and the places [c] of their targets in the microbatch."""
        model, tensor, weight = self.decoder.config, self.tensor, self.decoder.head_weight
        cap, kind = model.logit_softcap, device_kind(hidden.device.type)
        head = _Head(
            needs_gradients=torch.is_grad_enabled() and hidden.requires_grad,
            trains_weight=weight.requires_grad,
            rows=model.vocab_size if tensor is None else tensor.softmax.part.rows,
            chunk=kind.chunk_tokens(model.vocab_size, self._chunk),
            losses=_softcapped_losses(losses, cap) if cap else losses,
            slope=_softcapped_slope(slope, cap) if cap else slope,
        )
        flat = hidden.flatten(0, 1)
        places = torch.arange(len(flat), device=flat.device)
        total: Tensor = _LinearCrossEntropy.apply(flat, weight, places, None, head)  # type: ignore[no-untyped-call]
        return total

    def _loss_of_logits(
        self,
        objective: Distill,
        hidden: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        side: Side,
    ) -> Tensor:
        """The same of an objective that reads logits. It has one pass of the head: the gradient
        with respect to a chunk's logits is found with its losses."""
        flat = targets.flatten()
        empty = flat.new_zeros(len(flat), 1)  # if the microbatch is skipped
        ids, logps = (
            side[n].flatten(0, 1) if n in side else empty for n in (TEACHER_IDS, TEACHER_LOGPS)
        )
        totals = {name: torch.zeros_like(flat[:1], dtype=torch.float64) for name in objective.parts}

        def losses(logits: Tensor, at: Tensor) -> Tensor:
            found = objective.of_logits(logits.to(wide), flat[at], ids[at], logps[at])
            for name, part in found.parts.items():
                totals[name] += part.detach().sum(dtype=torch.float64)
            return found.total

        def slope(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                found = losses(leaf, at)
                (gradient,) = torch.autograd.grad(found.sum(), leaf)
            return found.detach(), gradient

        wide = _wide_dtype(hidden.dtype)
        total = self._carry(hidden, losses, slope)
        count = (flat != IGNORED_TARGET).sum(dtype=torch.float64)
        nothing = torch.zeros_like(count), torch.zeros_like(count)
        sums = dict.fromkeys(objective.names, nothing)
        sums |= {name: (summed[0], count) for name, summed in totals.items()}
        sums |= objective.of_rows(targets, documents, side)
        said = torch.stack([total.detach(), *(word for pair in sums.values() for word in pair)])
        out: Tensor = _Reported.apply(total, said)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def _log_probabilities(
        self, hidden: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, ...]:
        """hidden: [B, S, D], targets: [B, S] -> [B, S], and the entropies [B, S] if asked for"""
        rows = hidden.flatten(0, 1), self.decoder.head_weight, targets.flatten()
        found = linear_losses(*rows, self._chunk, entropy=entropy, **self._head_keywords())
        losses, *more = found.view(1 + entropy, *targets.shape)
        return -losses, *more

    def _values(self, hidden: Tensor) -> Tensor | None:
        """The score head's output, in at least float32; None without one. Each tp rank has some
        columns of the head, and gives a summand of the gradient of `hidden`.
        [B, S, D] -> [B, S]"""
        score = self.decoder.score
        if score is None:
            return None
        if self.tensor is None:
            return F.linear(hidden, score.weight)[..., 0].to(_wide_dtype(hidden.dtype))
        collectives = self.tensor.collectives
        first, size = tp_part(hidden.shape[-1], collectives.size, collectives.rank)
        part = F.linear(hidden.narrow(-1, first, size), score.weight)[..., 0]
        return collectives.reduce(part.to(_wide_dtype(hidden.dtype)))

    def run_compiled_loss(self, targets: Tensor, dtype: torch.dtype) -> None:
        """Run the loss and its gradient once for each length of chunk, as `forward` does for
        targets [T] and a decoder of `dtype`. The compiler then knows them."""
        model = self.decoder.config
        kind = device_kind(targets.device.type)
        rows = min(len(targets), kind.chunk_tokens(model.vocab_size, self._chunk))
        logits_dtype = _wide_dtype(dtype) if model.logit_softcap else dtype
        with torch.no_grad():
            for length in filter(None, (rows, len(targets) % rows)):
                logits = torch.zeros(
                    length, model.vocab_size, dtype=logits_dtype, device=targets.device
                )
                self._loss_and_gradient(logits, targets[:length])


class _Reported(torch.autograd.Function):
    """Numbers whose first one has the gradient of another scalar."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, said: Tensor) -> Tensor:
        return said

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0], None


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | str = "auto",
    *,
    vocabulary: int,
    part: VocabularySoftmax | None = None,
    softcap: float = 0.0,
    entropy: bool = False,
) -> Tensor:
    """-log softmax(hidden weight^T)[target] of each target, without a gradient; 0 for those of
    -100. entropy: the entropy of the softmax too. The other parameters are those of
    `linear_cross_entropy`.  [T, D], [V, D], [T] -> [T], or [2, T]"""
    losses: Losses = _losses if part is None else part.losses
    entropies = _entropies if part is None else part.entropies
    rows = vocabulary if part is None else part.part.rows
    size = device_kind(hidden.device.type).chunk_tokens(vocabulary, chunk)
    found = []
    for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
        logits = F.linear(h, weight[:rows])
        logits = _softcapped(logits, softcap) if softcap else logits
        one = losses(logits, t)
        if entropy:
            one = torch.stack((one, entropies(logits).masked_fill(t < 0, 0.0)))
        found.append(one)
    return torch.cat(found, -1)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | str = "auto",
    slope: LossAndGradient | None = None,
    *,
    vocabulary: int | None = None,
    part: VocabularySoftmax | None = None,
    softcap: float = 0.0,
    scale: Tensor | None = None,
) -> Tensor:
    """Sum of -log softmax(hidden weight^T)[target], in float64, over targets that are not -100.

    hidden: [T, D], weight: [V, D], targets: [T] int64 -> scalar. The softmax is taken in at least
    float32. chunk: tokens at a time, as `train.loss_chunk` says.

    vocabulary: number of tokens V, if a complete `weight` has padding rows after them.
    part: given if the vocabulary is cut over ranks. `weight` then has this rank's rows. Each rank
        gets the full loss, the gradient of its rows, and a summand of the gradient of `hidden`.
    softcap: the softmax is of softcap * tanh(logits / softcap); 0: of the logits.
    scale: what each target counts [T]; None: once.
    """
    losses: Losses = _losses if part is None else part.losses
    slope = (slope or _loss_and_gradient_in_place) if part is None else part.losses_and_gradient
    if softcap:
        losses, slope = _softcapped_losses(losses, softcap), _softcapped_slope(slope, softcap)
    known = vocabulary or weight.shape[0] if part is None else part.part.vocabulary
    head = _Head(
        needs_gradients=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
        trains_weight=weight.requires_grad,
        rows=known if part is None else part.part.rows,
        chunk=device_kind(hidden.device.type).chunk_tokens(known, chunk),
        losses=losses,
        slope=slope,
    )
    out: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, scale, head
    )
    return out


def _softcapped_losses(losses: Losses, cap: float) -> Losses:
    """`losses` of limited logits."""
    return lambda logits, targets: losses(_softcapped(logits, cap), targets)


def _softcapped_slope(slope: LossAndGradient, cap: float) -> LossAndGradient:
    """`slope` of limited logits, and the gradient carried back through the limit."""

    def through(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        limited = _softcapped(logits, cap)
        losses, g = slope(limited, targets)
        return losses, (g * (1.0 - (limited / cap).square())).to(logits.dtype)

    return through


def _softcapped(logits: Tensor, cap: float) -> Tensor:
    """[c, V] -> [c, V], in at least float32"""
    return soft_limit(logits.to(_wide_dtype(logits.dtype)), cap)


class _Head(NamedTuple):
    """How `_LinearCrossEntropy` computes: whether gradients too (and that of the weight), with so
    many of the weight's rows, in such chunks."""

    needs_gradients: bool
    trains_weight: bool
    rows: int
    chunk: int
    losses: Losses
    slope: LossAndGradient


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass; the backward only scales what the forward found."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, held: Tensor, targets: Tensor, scale: Tensor | None, head: _Head
    ) -> Tensor:
        weight, chunk = held[: head.rows], head.chunk
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if head.needs_gradients else None
        weight_gradient: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk):
            h, t = hidden[start : start + chunk], targets[start : start + chunk]  # [c, D], [c]
            once = None if scale is None else scale[start : start + chunk]  # [c]
            logits = F.linear(h, weight)  # [c, V]
            if hidden_gradient is None:
                total += _times(head.losses(logits, t), once).sum(dtype=torch.float64)
                continue
            losses, g = head.slope(logits, t)
            total += _times(losses, once).sum(dtype=torch.float64)
            torch.mm(g, weight, out=hidden_gradient[start : start + chunk])
            if once is not None:  # the rows of h, as those of g are a vocabulary long
                hidden_gradient[start : start + chunk].mul_(once[:, None])
                h = h * once[:, None].to(h.dtype)
            if not head.trains_weight:
                continue
            if weight_gradient is None:
                weight_gradient = _head_gradient(g, h, held.shape[0])
                if hidden.shape[0] > chunk:  # several chunks add up in at least float32
                    weight_gradient = weight_gradient.to(_wide_dtype(weight.dtype))
            elif weight_gradient.dtype == weight.dtype:
                weight_gradient[: head.rows].addmm_(g.T, h)
            else:
                weight_gradient[: head.rows].add_(g.T @ h)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if scale.device.type == "cpu" and scale.item() == 1.0:  # the rule; no pass over memory
            return hidden_gradient, weight_gradient, None, None, None
        if weight_gradient is not None:
            weight_gradient = _scaled(weight_gradient, scale)
        return _scaled(hidden_gradient, scale), weight_gradient, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """gradient * scale. float16 has no room for a loss scale, so that product is float32's."""
    if gradient.dtype == torch.float16:
        return (gradient.float() * scale.float()).half()
    return gradient * scale.to(gradient.dtype)


def _times(losses: Tensor, scale: Tensor | None) -> Tensor:
    return losses if scale is None else losses * scale


def _head_gradient(g: Tensor, hidden: Tensor, rows: int) -> Tensor:
    """g: [c, r], hidden: [c, D] -> [rows, D]: zeros for the rows that were not computed with"""
    if g.shape[1] == rows:
        return g.T @ hidden
    out = hidden.new_zeros(rows, hidden.shape[1])
    torch.mm(g.T, hidden, out=out[: g.shape[1]])
    return out


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A `LossAndGradient` without side effects, for the compiler to make one or two passes of."""
    wide = logits.to(_wide_dtype(logits.dtype))
    carried, index = (targets != IGNORED_TARGET)[:, None], targets.clamp_min(0)[:, None]  # [c, 1]
    log_sum = wide.logsumexp(-1, keepdim=True)  # [c, 1]
    losses = torch.where(carried, log_sum - wide.gather(1, index), 0.0)
    hot = torch.arange(logits.shape[1], device=logits.device)[None] == index  # [c, V]
    found = torch.where(carried, (wide - log_sum).exp() - hot.to(wide.dtype), 0.0)
    return losses[:, 0], found.to(logits.dtype)


def _loss_and_gradient_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A `LossAndGradient` operation by operation, each into the memory of the one before."""
    log_p = _log_softmax(logits)
    losses = target_losses(log_p, targets)
    index = targets.clamp_min(0)[:, None]
    g = log_p.exp_().scatter_add_(1, index, log_p.new_full((1, 1), -1.0).expand_as(index))
    return losses, _zero_rows(g, targets == IGNORED_TARGET).to(logits.dtype)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: [c, V], targets: [c] -> losses [c]"""
    return target_losses(_log_softmax(logits), targets)


def _entropies(logits: Tensor) -> Tensor:
    """logits: [c, V] -> [c], in nats"""
    log_p = _log_softmax(logits)
    return -log_p.exp().mul_(log_p).sum(-1)


def _entropy_gradient(logits: Tensor) -> Tensor:
    """d entropy / d logits.  [c, V] -> [c, V], in at least float32"""
    log_p = _log_softmax(logits)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return p.mul_(log_p.add_(entropy)).neg_()


def target_losses(log_p: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target that carries loss, 0 otherwise. log_p: [c, V], targets: [c] -> [c]"""
    picked = log_p.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return -picked.masked_fill(targets == IGNORED_TARGET, 0.0)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmaxes and sums: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(logits: Tensor) -> Tensor:
    """[c, V] -> [c, V], a new tensor"""
    return F.log_softmax(logits, dim=-1, dtype=_wide_dtype(logits.dtype))


def _zero_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Zero the rows [c] of a [c, V] tensor in place.

    On the CPU only those are touched; on an accelerator that would wait for their number.
    """
    if tensor.device.type == "cpu":
        return tensor.index_fill_(0, rows.nonzero()[:, 0], 0.0)
    return tensor.masked_fill_(rows[:, None], 0.0)
