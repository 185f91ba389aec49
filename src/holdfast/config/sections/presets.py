"""Named model shapes, from one million parameters to Llama 3.1 405B.

Sources: the `config.json` of each model's public repository (Llama 3.1 and 3.2, Qwen 3 dense);
the small ones are ours, for laptops and tests.
"""

from __future__ import annotations

from typing import Any

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
