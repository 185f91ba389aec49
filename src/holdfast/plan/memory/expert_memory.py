"""Bytes of a feed-forward of experts (`model/experts.py`) in a block's passes, by formulas.

How many tokens an expert gets is known in the run alone. Here each expert gets as many as any
other: the expected load, not a bound. T tokens of a rank make N = T k choices, and as many arrive
at its experts under `layout.ep`. E is all experts, e those on the rank, F their inner width, and S
that of the shared expert. i and w are as in `activations.py`. A forward pass keeps

    experts      i N (2 D + 4 F), and 16 bytes for each choice; with ep 32
    shared       4 i T S
    router       T (w E + w k + 8 k), and w T (k + 1) where weights are normalised. With a z loss
                 w T (E + 1) more; in bf16 w T D for a wide copy of the input, and i T k

The products of a loop over experts have their gradients in a list. So the end of the backward has
the gradients of three matrices of all experts, and one of them twice. A grouped product (bf16) has
one matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.sections.model import ExpertsConfig, ModelConfig

_GROUPED_MULTIPLE = 8  # as `model/experts.py`


@dataclass(frozen=True)
class ExpertShape:
    """What the formulas need of a rank's routed feed-forward. here: experts on the rank. inner,
    shared: widths on the rank. is_spread: tokens travel to experts of other ranks."""

    config: ExpertsConfig
    dim: int
    here: int
    inner: int
    shared: int
    tokens: int
    item: int
    wide: int
    is_spread: bool

    @staticmethod
    def of(
        model: ModelConfig, tokens: int, item: int, wide: int, *, tp: int, ep: int
    ) -> ExpertShape | None:
        """Return None without experts. tp, ep: degrees of the replica."""
        config = model.experts
        if config is None:
            return None
        inner, here = model.inner_dim // tp, config.count // ep
        shared = inner * config.shared
        return ExpertShape(config, model.dim, here, inner, shared, tokens, item, wide, ep > 1)

    @property
    def choices(self) -> int:
        """Of the rank's tokens, and by expectation of those that its experts compute."""
        return self.tokens * self.config.top_k

    @property
    def kept(self) -> int:
        """Bytes that a forward pass keeps, beyond the feed-forward's input."""
        rows = self.item * self.choices * (2 * self.dim + 4 * self.inner)
        numbers = self.choices * (32 if self.is_spread else 16)
        shared = 4 * self.item * self.tokens * self.shared
        return rows + numbers + shared + self._router

    @property
    def _router(self) -> int:
        config, k = self.config, self.config.top_k
        width = self.wide * (config.count + k) + 8 * k
        width += self.wide * (k + 1) * config.normalise
        width += self.wide * (config.count + 1) * (config.z_loss > 0)
        if self.item < self.wide:
            width += self.wide * self.dim + self.item * k
        return self.tokens * width

    @property
    def working(self) -> int:
        """Most bytes of a backward pass through it, beyond what is kept."""
        rows = self.item * self.choices * self.dim
        matrix = self.item * self.here * self.inner * self.dim
        matrices = 1 if self._is_grouped else 4
        return max(2 * rows, matrices * matrix + 2 * rows - self.kept)

    @property
    def _is_grouped(self) -> bool:
        return self.item == 2 and not (
            self.inner % _GROUPED_MULTIPLE or self.dim % _GROUPED_MULTIPLE
        )
