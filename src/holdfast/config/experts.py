"""`model.experts`: feed-forwards of which each token takes a few."""

from __future__ import annotations

from pydantic import Field, model_validator

from holdfast.config.base import Section


class ExpertsConfig(Section):
    """A router chooses `top_k` of `count` experts for each token, by the softmax of its scores."""

    count: int = Field(8, ge=1, le=2**14, description="experts of each block")
    top_k: int = Field(2, ge=1, description="experts that compute each token")
    width: int = Field(0, ge=0, description="inner dim of one expert; 0: model.ffn_dim")
    normalise: bool = Field(
        True, description="the weights of a token's experts add up to 1, as in Mixtral"
    )
    balance_loss: float = Field(
        0.0,
        ge=0,
        description="weight of the loss that spreads tokens over experts (Fedus et al. 2021): 1 a "
        "block if all experts have equal work",
    )
    z_loss: float = Field(
        0.0, ge=0, description="weight of the loss that keeps the router's scores small"
    )

    @model_validator(mode="after")
    def _enough(self) -> ExpertsConfig:
        if self.top_k > self.count:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.count} experts: use {self.count}"
            )
        return self

    @property
    def has_loss(self) -> bool:
        """Return True if the router has a loss of its own."""
        return self.balance_loss > 0 or self.z_loss > 0
