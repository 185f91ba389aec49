"""`model.experts`: feed-forwards of which each token takes a few."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from holdfast.config.sections.base import Section


class ExpertsConfig(Section):
    """A router chooses `top_k` of `count` experts for each token."""

    count: int = Field(8, ge=1, le=2**14, description="experts of each block")
    top_k: int = Field(2, ge=1, description="experts that compute each token")
    width: int = Field(0, ge=0, description="inner dim of one expert; 0: model.ffn_dim")
    normalise: bool = True
    """the weights of a token's experts add up to 1, as in Mixtral"""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """what makes weights of scores; sigmoid as in DeepSeek-V3"""
    scale: float = Field(1.0, gt=0, description="of the weights of a token's experts")
    shared: int = Field(0, ge=0)
    """experts that compute every token, as one of that many widths"""
    first: int = Field(0, ge=0)
    """number of the first block with experts; those before it have none"""
    choice_bias: bool = False
    """a bias of each expert enters the choice, and not the weights"""
    bias_rate: float = Field(0.0, ge=0)
    """by which a step moves each expert's bias towards an even load (Wang et al. 2024); 0: it
    stays"""
    capacity: float = Field(0.0, ge=0, le=2**14)
    """most choices that an expert computes of a microbatch, in even parts: 1.25; later ones are
    dropped in training. 0: none is dropped"""
    balance_loss: float = Field(0.0, ge=0)
    """weight of the loss that spreads tokens over experts (Fedus et al. 2021): 1 a block if all
    experts have equal work"""
    z_loss: float = Field(0.0, ge=0)
    """weight of the loss that keeps the router's scores small"""

    @model_validator(mode="after")
    def _enough(self) -> ExpertsConfig:
        if self.top_k > self.count:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.count} experts: use {self.count}"
            )
        if self.bias_rate and not self.choice_bias:
            raise ValueError(f"bias_rate {self.bias_rate} needs a bias: use 0, or choice_bias true")
        return self

    @property
    def has_loss(self) -> bool:
        """Return True if the router has a loss of its own."""
        return self.balance_loss > 0 or self.z_loss > 0
