"""The section `outer`: learners that train apart, and the round that brings them together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Never, Section
from holdfast.config.sections.outer_trust import OuterTrustConfig
from holdfast.errors import ConfigError

Average = Literal[
    "mean",
    "token_weighted",
    "rda",
    "median",
    "trimmed_mean",
    "geometric_median",
    "krum",
    "multi_krum",
    "centred_clipping",
]


class OuterOptimizerConfig(Section):
    """What applies the average of a round to the weights."""

    name: Never[Literal["nesterov", "sgd"]] = "nesterov"
    """nesterov: SGD with Nesterov's momentum, as DiLoCo has it; sgd: SGD"""
    learning_rate: Never[float] = Field(0.7, gt=0)
    """rate of the outer update, the same in each round. sgd with rate 1 is local SGD: the weights
    become the average of the learners'"""
    momentum: Never[float | None] = Field(None, ge=0, lt=1, description="nesterov: 0.9; sgd: 0")

    @property
    def momentum_value(self) -> float:
        """The momentum, with the default of its optimizer."""
        if self.momentum is None:
            return 0.9 if self.name == "nesterov" else 0.0
        return self.momentum

    def broken_rules(self) -> Iterator[str]:
        if self.name == "nesterov" and self.momentum == 0:
            yield "momentum 0 leaves nothing of Nesterov's method: use name sgd, or momentum 0.9"


class OuterCodecConfig(Section):
    """How the change of a learner's weights is coded for its way to the other workers."""

    name: Never[Literal["auto", "none", "bf16", "int8", "int4", "int2", "topk", "powersgd"]] = (
        "none"
    )
    """none: sums travel in fp32. int8, int4: blocks of 256 values with one scale. int2: with two
    magnitudes. topk: the largest values of each 4,096. powersgd: two thin factors of each matrix. A
    coded change goes to each worker. auto: a start measures none, bf16, int8 and int4 and keeps the
    one with the shortest round by cluster.sites"""
    rank: Never[int] = Field(4, ge=1, le=1024, description="powersgd: columns of a factor")
    share: Never[float] = Field(
        0.01, gt=0, le=1, description="topk: part of the values that is sent"
    )
    error_feedback: Never[float] = Field(1.0, ge=0, le=1)
    """part of what the codec left out that the learner adds to its next change; 0: it is lost"""

    @property
    def is_on(self) -> bool:
        """Return True if changes are coded."""
        return self.name != "none"

    @property
    def keeps_error(self) -> bool:
        """Return True if learners keep what was left out."""
        return self.is_on and self.error_feedback > 0


class OuterFreeConfig(Section):
    """When a round of `outer.mode: free` closes."""

    quorum: Never[int] = Field(0, ge=0)
    """learners that must be done before a round closes without the rest; 0: more than half"""
    grace_seconds: Never[float] = Field(5.0, ge=0)
    """seconds that the rest has after the quorum. If workers have unlike numbers of learners, they
    begin once the largest share could be done at the pace of the quorum"""
    late: Never[Literal["drop", "use", "discount"]] = "drop"
    """what a learner did that a close interrupted. use: it counts by the tokens that it read.
    discount: it counts in the next round, so no round waits for its way"""
    discount: Never[float] = Field(0.5, gt=0, le=1)
    """late discount: factor of the tokens of a late change"""


class OuterConfig(Section):
    """Learners that train apart for many steps before they are averaged, for slow links
    ([outer-rounds.md](../guide/outer-rounds.md)). The curve is not that of data parallelism, so
    promise 1 holds among runs of the same section alone."""

    learners: Never[int] = Field(0, ge=0, le=4096)
    """learners, each with its own slice of the sample order and its own optimizer; 0: none, all
    workers exchange gradients in each step"""
    every_steps: Never[int] = Field(30, ge=1, le=10**6)
    """inner steps of a learner in a round"""
    fragments: Never[int] = Field(1, ge=1, le=4096)
    """parts of the weights, of which each round exchanges one in turn. A round then has
    every_steps / fragments inner steps, and each part is exchanged once in every_steps"""
    overlap_steps: Never[int] = Field(0, ge=0, le=10**6)
    """inner steps that a learner does while its change travels: the last ones of the round. The
    average is applied after them. 0: a learner waits for the average"""
    overlap_alpha: Never[float] = Field(0.5, ge=0, lt=1)
    """part of its own weights that a learner keeps when the average arrives. The rest are the
    weights of the run. 0: what it did since it sent its change is lost"""
    optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    average: Never[Average] = "mean"
    """of the learners' changes. mean: each counts once; token_weighted: by the tokens of its round.
    rda: of each tensor the mean norm, along the mean direction. The rest bound what a minority of
    wrong changes can do. With these and rda each worker gets all changes"""
    faulty: Never[int] = Field(1, ge=0)
    """trimmed_mean, krum, multi_krum: learners that may be wrong"""
    codec: OuterCodecConfig = OuterCodecConfig()
    trust: OuterTrustConfig = OuterTrustConfig()
    mode: Never[Literal["fixed", "free"]] = "fixed"
    """fixed: each round has all learners. free: a round closes without learners that are late. This
    gives up promise 1: the curve depends on who was late. The journal has a ledger, from which
    `holdfast audit replay RUN --round N` computes a round again"""
    free: OuterFreeConfig = OuterFreeConfig()

    @property
    def is_on(self) -> bool:
        """Return True if the run has learners."""
        return self.learners > 0

    @property
    def inner_steps(self) -> int:
        """Inner steps of a round."""
        return self.every_steps // self.fragments

    @property
    def keeps_weights(self) -> bool:
        """Return True if each learner has weights of its own between rounds."""
        return self.is_on and (self.fragments > 1 or self.overlap_steps > 0)

    def refuse_one_state(self, what: str, where: str, remedy: str) -> None:
        """Raises ConfigError for a run with learners. what: it holds the state of one optimizer."""
        if self.is_on:
            raise ConfigError(
                f"{what} holds one optimizer's state, and outer.learners {self.learners} have one "
                "each",
                where=where,
                remedy=remedy,
            )

    @property
    def is_sum(self) -> bool:
        """Return True if `average` can be made of the sum of all changes."""
        return self.average in ("mean", "token_weighted")

    @property
    def needs_all(self) -> bool:
        """Return True if a round takes each change, and not only the sum of all."""
        return not self.is_sum or self.trust.is_on

    @property
    def counts_faulty(self) -> bool:
        """Return True if `average` takes a number of wrong changes."""
        return self.average in ("trimmed_mean", "krum", "multi_krum")

    @property
    def sends_all(self) -> bool:
        """Return True if each worker gets the change of each learner, and not only their sum."""
        return self.is_on and (self.codec.is_on or self.needs_all or self.is_free)

    @property
    def is_free(self) -> bool:
        """Return True if a round closes without learners that are late."""
        return self.is_on and self.mode == "free"

    @property
    def keeps_late(self) -> bool:
        """Return True if a change that a close interrupted counts in the next round."""
        return self.is_free and self.free.late == "discount"

    @property
    def quorum(self) -> int:
        """The learners that a round of mode free waits for."""
        return self.free.quorum or self.learners // 2 + 1

    def broken_rules(self) -> Iterator[str]:
        if self.is_on and self.every_steps % self.fragments:
            good = max(1, round(self.every_steps / self.fragments)) * self.fragments
            yield (
                f"fragments {self.fragments} do not divide every_steps {self.every_steps}: use "
                f"every_steps {good}"
            )
        if self.is_on and 0 < self.inner_steps <= self.overlap_steps:
            most = self.inner_steps - 1
            remedy = f"overlap_steps {most}" if most else f"every_steps {2 * self.fragments}"
            yield (
                f"overlap_steps {self.overlap_steps} leave none of the {self.inner_steps} inner "
                f"steps of a round before its exchange: use {remedy}"
            )
        if self.is_on and self.counts_faulty and 2 * self.faulty >= self.learners:
            yield (
                f"faulty {self.faulty} of learners {self.learners} are no minority: use faulty "
                f"{(self.learners - 1) // 2}"
            )
        if self.is_free and self.fragments > 1:
            yield f"fragments {self.fragments} have not been built for mode free: use fragments 1"
        if self.learners == 1 and self.trust.held_out:
            yield "trust.held_out takes samples of another learner: use learners 2, or held_out 0"
        if self.is_on and self.trust.is_on and self.average == "token_weighted":
            yield "average token_weighted does not leave out changes: use average mean, or no trust"
        if self.fragments > 1:
            if self.codec.name == "powersgd":
                yield "codec.name powersgd has not been built for fragments: use fragments 1"
            if self.is_on and self.trust.is_on:
                yield "trust has not been built for fragments: use fragments 1, or no trust"
        if self.overlap_steps and self.is_free:
            yield "overlap_steps have not been built for mode free: use overlap_steps 0"
        if self.overlap_steps and self.is_on and self.trust.is_on:
            yield "trust has not been built for overlap_steps: use overlap_steps 0, or no trust"
        if self.is_free and self.average != "token_weighted":
            yield (
                f"mode free weighs learners by the tokens that they read, and average is "
                f"{self.average}: use average token_weighted"
            )
        if self.is_free and self.free.quorum > self.learners:
            yield (
                f"free.quorum {self.free.quorum} is more than learners {self.learners}: use "
                f"free.quorum {self.learners}"
            )

    def notices(self, has_snapshots: bool) -> Iterator[str]:
        """Yield the lines that a run prints when it starts. has_snapshots: each round is kept in
        memory."""
        if not self.is_on:
            return
        yield (
            f"outer.learners {self.learners}: a step is a round of {self.inner_steps} inner steps; "
            "the curve is another one than that of workers that exchange in each step"
        )
        if self.is_free:
            yield (
                f"outer.mode free: a round closes {self.free.grace_seconds:g} s after "
                f"{self.quorum} of {self.learners} learners are done. Promise 1 does not hold: the "
                "curve depends on who is late. holdfast audit replay RUN --round N computes a "
                "round again"
            )
        if not has_snapshots:
            yield (
                "checkpoint.memory_every_steps is not 1, so a lost worker costs all rounds since "
                "the last save; use checkpoint.memory_every_steps=1"
            )
