"""Tokens that end or begin a text, by the names that tokenizers in use give them."""

from __future__ import annotations

END = "<|end|>"
"""The token with which our own tokenizers end each document."""

KNOWN_ENDS = (
    END,
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
)
"""In the order in which they are looked for."""

KNOWN_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
