"""The `objective` section: what the built-in decoder is trained for.

A kind has keys of its own, with the names that TRL uses. A key that is left out has the default of
its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import Field

from holdfast.config.sections.base import Branch, Never, Section
from holdfast.config.sections.reference import ReferenceConfig

NEXT_TOKEN = "next_token"

Kind = Literal[
    "next_token", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "distill", "grpo", "rloo", "ppo"
]
DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
]
GrpoLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
LossType = Literal[DpoLoss, GrpoLoss]
_CLIPPED: dict[str, float | str] = {
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": 0.0,
    "entropy_coef": 0.0,
}
"""Keys of all policy gradients. epsilon_high 0: epsilon."""


@dataclass(frozen=True)
class KindOfObjective:
    """What follows from a kind."""

    defaults: Mapping[str, float | str] = field(default_factory=dict)  # of its keys
    unit: str = "tokens"  # what the weight of a microbatch counts
    is_of_pairs: bool = False  # documents 2i and 2i + 1 are chosen and rejected
    has_score_head: bool = False  # a head [1, D] gives a value of each token
    has_language_head: bool = True  # the vocabulary's head is used
    needs_reference: bool = False  # log-probabilities under the reference
    makes_rows: bool = False  # rows are completions, which the run generates (section rollout)
    has_rows: bool = True  # a sample has several rows, which must not see each other
    needs_all_logits: bool = False  # of a token, on one rank


KINDS: Mapping[str, KindOfObjective] = {
    NEXT_TOKEN: KindOfObjective(),
    "dpo": KindOfObjective(
        {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0, "discopop_tau": 0.05},
        "pairs",
        is_of_pairs=True,
        needs_reference=True,
    ),
    "ipo": KindOfObjective({"beta": 0.1}, "pairs", is_of_pairs=True, needs_reference=True),
    "simpo": KindOfObjective(
        {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0, "cpo_alpha": 0.0},
        "pairs",
        is_of_pairs=True,
    ),
    "orpo": KindOfObjective({"beta": 0.1}, "pairs", is_of_pairs=True),
    "kto": KindOfObjective(
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        "rows",
        needs_reference=True,
    ),
    "reward": KindOfObjective(
        {"center_rewards_coefficient": 0.0},
        "pairs",
        is_of_pairs=True,
        has_score_head=True,
        has_language_head=False,
    ),
    "grpo": KindOfObjective(
        {
            **_CLIPPED,
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "scale_rewards": "group",
            "max_completion_length": 0.0,
        },
        "rows",
        makes_rows=True,
    ),
    "rloo": KindOfObjective(_CLIPPED, "rows", makes_rows=True),
    "ppo": KindOfObjective(
        {
            **_CLIPPED,
            "gamma": 1.0,
            "lam": 0.95,
            "cliprange_value": 0.5,
            "vf_coef": 0.5,
            "whiten_advantages": 0.0,
        },
        has_score_head=True,
        makes_rows=True,
    ),
    "distill": KindOfObjective(
        {"top_k": 64, "temperature": 1.0, "alpha": 0.5, "beta": 0.0},
        needs_reference=True,
        has_rows=False,
        needs_all_logits=True,
    ),
}


class ObjectiveConfig(Section):
    """What is minimised. Keys of another kind are refused."""

    kind: Never[Kind] = "next_token"
    """next_token; preferences: dpo, ipo, simpo, orpo, kto; reward, a reward model; distill, from a
    teacher's likeliest tokens, with rollout after the student's own. Policy gradients: grpo, rloo,
    ppo"""
    beta: Branch[float | None] = Field(None, ge=0)
    """dpo, ipo, kto: strength of the pull to the reference (0.1). simpo: scale of rewards (2.0).
    orpo: weight of the odds ratio (0.1). distill: 0 is the forward KL, 1 the reverse one (0).
    grpo, rloo, ppo: weight of the KL to the reference (0)"""
    loss_type: Branch[LossType | None] = None
    """dpo: the loss of a pair (sigmoid). grpo: what divides a completion's sum (dapo: the tokens of
    the step; grpo: its own; dr_grpo: max_completion_length). Names of TRL"""
    label_smoothing: Branch[float | None] = Field(None, ge=0, lt=1)
    """dpo, simpo: share of pairs whose order is taken to be wrong (0)"""
    discopop_tau: Branch[float | None] = Field(None, gt=0)
    """dpo with loss_type discopop: temperature of its mixture (0.05)"""
    simpo_gamma: Branch[float | None] = Field(None, ge=0)
    """simpo: margin that the chosen answer must have (0.5)"""
    cpo_alpha: Branch[float | None] = Field(None, ge=0)
    """simpo: weight of the chosen answer's cross entropy (0)"""
    desirable_weight: Branch[float | None] = Field(None, ge=0)
    """kto: weight of the wanted rows (1)"""
    undesirable_weight: Branch[float | None] = Field(None, ge=0)
    """kto: weight of the unwanted rows (1)"""
    center_rewards_coefficient: Branch[float | None] = Field(None, ge=0)
    """reward: weight of a term that centres rewards at 0 (0)"""
    epsilon: Branch[float | None] = Field(None, gt=0, lt=1)
    """grpo, rloo, ppo: ratios are clipped at 1 - epsilon and 1 + epsilon (0.2)"""
    epsilon_high: Branch[float | None] = Field(None, ge=0)
    """grpo, rloo, ppo: the upper clip, if it is another; 0: epsilon"""
    importance_sampling_level: Branch[Literal["token", "sequence"] | None] = None
    """grpo: ratios of tokens, or of complete rows as in GSPO (token)"""
    entropy_coef: Branch[float | None] = Field(None, ge=0)
    """grpo, rloo, ppo: weight of a bonus for the entropy of each token's distribution (0)"""
    scale_rewards: Branch[Literal["group", "batch", "none"] | None] = None
    """grpo: what divides advantages: the standard deviation of the rewards of a group, or of all
    groups of the step (group)"""
    max_completion_length: Branch[int | None] = Field(None, ge=0)
    """grpo with loss_type dr_grpo: what divides a completion's sum: rollout.max_tokens"""
    gamma: Branch[float | None] = Field(None, gt=0, le=1)
    """ppo: discount of each token (1)"""
    lam: Branch[float | None] = Field(None, ge=0, le=1)
    """ppo: lambda of generalised advantage estimation (0.95)"""
    cliprange_value: Branch[float | None] = Field(None, gt=0)
    """ppo: furthest that a value moves from that before the step (0.5)"""
    vf_coef: Branch[float | None] = Field(None, ge=0)
    """ppo: weight of the loss of values (0.5)"""
    whiten_advantages: Branch[bool | None] = None
    """ppo: give the advantages of a step mean 0 and variance 1, as verl does (false)"""

    top_k: Branch[int | None] = Field(None, ge=1, le=1024)
    """distill: likeliest tokens that are stored of each place (64)"""
    temperature: Branch[float | None] = Field(None, gt=0)
    """distill: both distributions are taken at it (1)"""
    alpha: Branch[float | None] = Field(None, ge=0, le=1)
    """distill: weight of the cross entropy, next to that of the divergence (0.5; with rollout 0)"""
    reference: Never[ReferenceConfig] = ReferenceConfig()

    @property
    def facts(self) -> KindOfObjective:
        """What follows from the kind."""
        return KINDS[self.kind]

    @property
    def is_next_token(self) -> bool:
        return self.kind == NEXT_TOKEN

    @property
    def score_head(self) -> str:
        """The value of `model.score_head` that the kind needs."""
        if not self.facts.has_score_head:
            return "none"
        return "also" if self.facts.has_language_head else "only"

    @property
    def counts(self) -> str:
        """What the weight of a microbatch counts, if it is not tokens."""
        unit = self.facts.unit
        by_tokens = self.kind == "grpo" and self.text("loss_type") in ("bnpo", "dapo")
        return "" if unit == "tokens" or by_tokens else unit

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        pulls = self.facts.makes_rows and self.number("beta") > 0
        return self.facts.needs_reference or pulls

    @property
    def of_steps(self) -> bool:
        """Whether what a row counts follows from all rows of its step."""
        kind = self.kind
        is_scaled = kind == "grpo" and self.text("scale_rewards") == "batch"
        return is_scaled or (kind == "ppo" and bool(self.whiten_advantages))

    def number(self, key: str) -> float:
        """Return a key's value, or the default of the kind."""
        said = getattr(self, key)
        return float(self.facts.defaults[key] if said is None else said)

    def text(self, key: str) -> str:
        """The same for a key that is a word."""
        said = getattr(self, key)
        return str(self.facts.defaults[key] if said is None else said)

    def broken_rules(self) -> Iterator[str]:
        for key in type(self).model_fields:
            if (
                key in ("kind", "reference")
                or getattr(self, key) is None
                or key in self.facts.defaults
            ):
                continue
            kinds = [kind for kind, facts in KINDS.items() if key in facts.defaults]
            yield (
                f"{key} is a key of {' and '.join(kinds)}, and kind is {self.kind}: "
                f"use objective.kind: {kinds[0]}, or remove {key}"
            )
        if self.reference.model and not self.reads_reference:
            what = "beta 0" if self.facts.makes_rows else f"kind {self.kind}"
            remedy = "objective.beta: 0.01" if self.facts.makes_rows else "objective.kind: dpo"
            yield (
                f"reference.model has no effect, as {what} needs no reference: use {remedy}, or "
                "remove the key"
            )
        losses = {"dpo": get_args(DpoLoss), "grpo": get_args(GrpoLoss)}.get(self.kind, ())
        if self.loss_type is not None and losses and self.loss_type not in losses:
            yield (
                f"loss_type {self.loss_type} is none of kind {self.kind}: use "
                f"{', '.join(losses[:-1])} or {losses[-1]}"
            )
        elif self.kind == "dpo":
            yield from self._broken_dpo_rules()
        elif self.kind == "grpo":
            yield from self._broken_grpo_rules()
        if self.kind == "distill" and not self.reference.model:
            yield (
                "kind distill has no teacher: use reference: {model: FOLDER}, in Hugging Face form"
            )
        if self.kind == "distill" and self.number("beta") > 1:
            yield f"beta {self.beta} is above 1, the reverse KL: use beta 1"
        if self.kind in ("ipo", "simpo") and self.beta == 0:
            yield f"beta 0 divides by zero in {self.kind}: use {self.facts.defaults['beta']}"

    def _broken_grpo_rules(self) -> Iterator[str]:
        is_divided = self.text("loss_type") == "dr_grpo"
        if is_divided and not self.max_completion_length:
            yield (
                "loss_type dr_grpo divides by max_completion_length: use the value of "
                "rollout.max_tokens"
            )
        if self.max_completion_length and not is_divided:
            yield (
                f"max_completion_length has no effect with loss_type {self.text('loss_type')}: "
                "use loss_type: dr_grpo"
            )

    def _broken_dpo_rules(self) -> Iterator[str]:
        smoothing, loss = self.number("label_smoothing"), self.text("loss_type")
        if smoothing and loss not in ("sigmoid", "robust", "exo_pair"):
            yield f"label_smoothing has no effect with loss_type {loss}: use loss_type: sigmoid"
        if loss == "robust" and smoothing >= 0.5:
            yield f"label_smoothing {smoothing} must be below 0.5 with loss_type robust: use 0.1"
        if loss == "exo_pair" and not smoothing:
            yield "loss_type exo_pair takes the logarithm of label_smoothing: use 0.001"
        if loss == "sppo_hard" and self.beta == 0:
            yield "beta 0 divides by zero in sppo_hard: use 0.1"
        if self.discopop_tau is not None and loss != "discopop":
            yield f"discopop_tau has no effect with loss_type {loss}: use loss_type: discopop"
