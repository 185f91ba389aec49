"""Small decoders and their counterparts in transformers, shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise

SMALL = {
    "preset": None,
    "layers": 2,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 56,
    "vocab_size": 96,
    "max_position": 256,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama_plain": {"kv_heads": 4},
    "llama_grouped_scaled": {"rope_scaling": SCALING, "rope_theta": 500_000.0},
    "llama_one_kv_head_tied": {"kv_heads": 1, "tied_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 24, "norm_eps": 1e-6},
    "qwen3_tied": {"family": "qwen3", "qk_norm": True, "head_dim": 24, "tied_embeddings": True},
}


def config(**changes: object) -> ModelConfig:
    """A two-layer decoder, changed as asked."""
    return ModelConfig.model_validate({**SMALL, **changes})


def decoder(model: ModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    """Built on meta, given memory, filled."""
    with torch.device("meta"):
        built = Decoder(model)
    built = built.to(dtype).to_empty(device="cpu")
    initialise(built, seed)
    return built


def lively(model: ModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    """Like `decoder`, with weights large enough that attention and gains really matter."""
    built = decoder(model, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise.to(dtype))
    return built


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """True where a query may see a key: not later, same document.  [B, S] -> [B, 1, S, S]"""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def tokens(*shape: int, seed: int = 0, below: int = 96) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def train_tokenizer(path: Path) -> Tokenizer:
    """A byte-level BPE of a few tokens, saved at `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["def add(a, b): return a + b\n" * 20], trainer)
    tokenizer.save(str(path))
    return tokenizer
