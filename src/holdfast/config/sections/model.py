"""`model:` the decoder's shape: a preset, and any number of it overridden.

Presets are named shapes, from one million parameters to Llama 3.1 405B. Sources: the `config.json`
of each model's public repository (Llama 3.1 and 3.2, Qwen 3 dense); the small ones are ours, for
laptops and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from holdfast.config.sections.base import Section
from holdfast.errors import nearest_of

_LLAMA31: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "max_position": 131_072,
    "norm_eps": 1e-5,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 8192,
    },
}
_LLAMA32 = _LLAMA31 | {
    "tied_embeddings": True,
    "rope_scaling": _LLAMA31["rope_scaling"] | {"factor": 32.0},
}
_QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "rope_theta": 1_000_000.0,
    "max_position": 40_960,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "kv_heads": 8,
    "head_dim": 128,
}


def _shape(layers: int, dim: int, heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "dim": dim, "heads": heads, "ffn_dim": ffn_dim, **more}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(3, 128, 4, 384, kv_heads=2, tied_embeddings=True),  # 0.7 M without embeddings
    "small": _shape(6, 256, 8, 768, kv_heads=4, tied_embeddings=True),
    "15m": _shape(8, 256, 8, 1792, kv_heads=8),
    "medium": _shape(12, 512, 8, 1536, kv_heads=4),
    "125m": _shape(12, 768, 12, 2048, kv_heads=12),
    "350m": _shape(24, 1024, 16, 2816, kv_heads=16),
    "175b": _shape(  # GPT-3's width and depth; the gated feed-forward has as many parameters as its
        96, 12_288, 96, 32_768, kv_heads=96, vocab_size=51_200, tied_embeddings=True
    ),
    "llama3.2-1b": _LLAMA32 | _shape(16, 2048, 32, 8192, head_dim=64),
    "llama3.2-3b": _LLAMA32 | _shape(28, 3072, 24, 8192),
    "llama3.1-8b": _LLAMA31 | _shape(32, 4096, 32, 14_336),
    "llama3.1-70b": _LLAMA31 | _shape(80, 8192, 64, 28_672),
    "llama3.1-405b": _LLAMA31 | _shape(126, 16_384, 128, 53_248),
    "qwen3-0.6b": _QWEN3 | _shape(28, 1024, 16, 3072, tied_embeddings=True),
    "qwen3-1.7b": _QWEN3 | _shape(28, 2048, 16, 6144, tied_embeddings=True),
    "qwen3-4b": _QWEN3 | _shape(36, 2560, 32, 9728, tied_embeddings=True),
    "qwen3-8b": _QWEN3 | _shape(36, 4096, 32, 12_288),
    "qwen3-14b": _QWEN3 | _shape(40, 5120, 40, 17_408),
    "qwen3-32b": _QWEN3 | _shape(64, 5120, 64, 25_600),
}


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

    def broken_rules(self) -> Iterator[str]:
        if self.top_k > self.count:
            yield f"top_k {self.top_k} is more than the {self.count} experts: use {self.count}"
        if self.bias_rate and not self.choice_bias:
            yield f"bias_rate {self.bias_rate} needs a bias: use 0, or choice_bias true"

    @property
    def has_loss(self) -> bool:
        """Return True if the router has a loss of its own."""
        return self.balance_loss > 0 or self.z_loss > 0


MAX_PARTS = 2**16
"""Largest number of blocks or heads: checks and plans look at each."""

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "dots1",
]


class RopeScaling(Section):
    """Slower rotary frequencies for a longer context. Types as Hugging Face names them."""

    type: Literal["llama3", "linear", "yarn"] = "llama3"
    """llama3: long waves are slowed (Llama 3.1); linear: all waves; yarn: long waves, by number of
    turns (Peng et al. 2023)"""
    factor: float = Field(8.0, gt=0, description="by which long waves are slowed")
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3: a wave of which fewer fit into the original context is long"""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3: a wave of which more fit is short, and kept"""
    original_max_position: int = Field(8192, gt=0)
    """context that the model was first trained with"""
    beta_fast: float = Field(32.0, gt=0, description="yarn: a wave with more turns is kept")
    beta_slow: float = Field(1.0, gt=0, description="yarn: a wave with fewer turns is slowed")
    attention_factor: float = Field(0.0, ge=0)
    """yarn: scale of cosine and sine; 0: 0.1 ln(factor) + 1"""
    truncate: bool = Field(True, description="yarn: the band's ends are rounded outwards")

    def broken_rules(self) -> Iterator[str]:
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}: use {4 * self.low_freq_factor}"
            )


class ModelConfig(Section):
    """One decoder. `vocab_size` 0 means: the prepared dataset's (planned)."""

    preset: str | None = Field("tiny", description="a shape of the table below; null: none")
    weights: str = ""
    """folder in Hugging Face form whose weights the run begins with: that of model.from, unless
    this is false; it may move. Empty: initial weights"""
    weights_checksum: str = ""
    """of the weights that the run began with; other ones are refused (planned)"""
    family: Family = Field("llama", description="the architecture that an export prefers")
    layers: int = Field(ge=1, le=MAX_PARTS, description="blocks")
    dim: int = Field(ge=1, description="model dim D")
    heads: int = Field(ge=1, le=MAX_PARTS, description="query heads H")
    kv_heads: int = Field(ge=1, le=MAX_PARTS, description="key/value heads K, a divisor of heads")
    head_dim: int = Field(0, ge=0, description="0: dim / heads")
    ffn_dim: int = Field(ge=1, description="SwiGLU's inner dim")
    experts: ExpertsConfig | None = None
    vocab_size: int = Field(0, ge=0, description="0: the dataset's (planned)")
    vocab_multiple: int = Field(1, ge=1)
    """rows of embedding and head are rounded up to a multiple of it"""
    max_position: int = Field(8192, ge=1, description="longest sequence")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(1e-5, gt=0, description="of RMSNorm")
    qk_norm: bool = Field(False, description="RMSNorm of queries and keys, as in Qwen 3")
    tied_embeddings: bool = Field(False, description="the head is the embedding table")
    score_head: Literal["none", "only", "also"] = "none"
    """a head that gives each token a value: only, in place of the vocabulary's (reward models);
    also, next to it (ppo). It follows from objective.kind"""
    init_std: float = Field(0.02, gt=0, description="of matrices at the start")
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """of the gate; gelu_tanh: its approximation, as in Gemma"""
    attention_bias: Literal["none", "qkv", "qkvo"] = "none"
    """which attention matrices have a bias; qkv as in Qwen 2"""
    qk_norm_width: Literal["head", "all"] = "head"
    """what one norm of queries or keys spans; all as in OLMo 2"""
    norms: Literal["pre", "post", "both"] = "pre"
    """norms before attention and feed-forward, after them (OLMo 2), or both (Gemma 2)"""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + its weight, as in Gemma"""
    window: int = Field(0, ge=0)
    """tokens that a token attends to, itself included; 0: all before it"""
    window_layers: tuple[int, ...] = ()
    """numbers of the blocks with the window, from 0; none: all blocks"""
    window_rope_theta: float = Field(0.0, ge=0)
    """rotary base of blocks with the window, without scaling; 0: as other blocks"""
    rope_fraction: float = Field(1.0, gt=0, le=1)
    """part of each head that rotary embedding turns"""
    no_rope_layers: tuple[int, ...] = ()
    """numbers of the blocks without rotary embedding, as in SmolLM 3"""
    embedding_multiplier: float = Field(1.0, gt=0, description="scale of the embedding's output")
    residual_multiplier: float = Field(1.0, gt=0)
    """scale of what a block adds to the residual stream, as in Granite"""
    attention_scale: float = Field(0.0, ge=0)
    """scale of attention scores; 0: 1 / sqrt(head dim)"""
    attention_softcap: float = Field(0.0, ge=0)
    """attention scores stay within it by tanh; 0: no limit"""
    logit_divisor: float = Field(1.0, gt=0, description="logits are divided by it, as in Granite")
    logit_softcap: float = Field(0.0, ge=0)
    """logits stay within it by tanh, as in Gemma 2; 0: no limit"""

    @property
    def has_language_head(self) -> bool:
        """Return True if it predicts tokens."""
        return self.score_head != "only"

    @property
    def has_tied_head(self) -> bool:
        """Return True if the embedding table is the head."""
        return self.tied_embeddings and self.has_language_head

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("preset", "tiny")
        if name is None or not isinstance(name, str):
            return value
        if name not in PRESETS:
            near = nearest_of(name, PRESETS, cutoff=0.0)
            known = (
                "" if nearest_of(name, PRESETS, 0.7) else f", and there are {', '.join(PRESETS)}"
            )
            raise ValueError(f"preset {name!r} is unknown{known}; nearest: {near}")
        return {**PRESETS[name], **value, "preset": name}

    def broken_rules(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            good = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            good = sorted(sorted(good, key=lambda k: abs(k - self.kv_heads))[:8])
            yield (
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}: use one of {good}"
            )
        if self.head_dim == 0 and self.dim % self.heads:
            nearest = self.dim // self.heads * self.heads or self.heads
            yield f"heads {self.heads} does not divide dim {self.dim}: use dim {nearest}"
        if self.head_size % 2:
            yield (
                f"the head dim {self.head_size} is odd and rotary embedding turns pairs: "
                f"use head_dim {self.head_size + 1}"
            )
        for key in ("window_layers", "no_rope_layers"):
            given = getattr(self, key)
            legal = sorted({number for number in given if 0 <= number < self.layers})
            if list(given) != legal:
                yield (
                    f"{key} {list(given)} are not rising numbers from 0 to {self.layers - 1}: "
                    f"use {legal}"
                )
        if self.experts is not None and self.experts.first >= self.layers:
            yield (
                f"experts.first {self.experts.first} leaves no block with experts: "
                f"use {self.layers - 1} or less"
            )
        if self.window_layers and not self.window:
            yield "window_layers are given without a window: use window 4096"
        if self.qk_norm_width == "all" and not self.qk_norm:
            yield "qk_norm_width all needs the norms: use qk_norm true"
        if self.rotary_size < 2 or self.rotary_size % 2:
            yield (
                f"rope_fraction {self.rope_fraction} of head dim {self.head_size} is "
                f"{self.rotary_size}, not an even number: use rope_fraction 1.0"
            )

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary embedding turns."""
        return int(self.head_size * self.rope_fraction)

    @property
    def windowed(self) -> tuple[int, ...]:
        """Numbers of the blocks that attend within the window, rising."""
        if not self.window:
            return ()
        return self.window_layers or tuple(range(self.layers))

    @property
    def inner_dim(self) -> int:
        """Inner dim of a feed-forward, or of one expert."""
        return (self.experts.width if self.experts else 0) or self.ffn_dim

    def has_experts(self, block: int) -> bool:
        """Return True for a block with experts in place of its feed-forward."""
        return self.experts is not None and block >= self.experts.first

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head.

        Rows beyond `vocab_size` are no tokens. They are zero and stay zero, so the model computes
        the same with and without them.
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
