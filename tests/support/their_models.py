"""Tiny models of transformers in folders, with the tokenizer that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENS = 280


def write_tokenizer(folder: Path) -> None:
    """One token for each byte, and pairs of letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dogs"] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(folder)


def config_of(kind: str, dropout: float = 0.0) -> Any:
    """The config of a tiny model. gpt2 has dropout, learned positions and a tied head; llama has
    rotary positions, and heads that share keys. qwen2 has keys for each head, and biases."""
    import transformers

    if kind == "gpt2":
        rates = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
        return transformers.GPT2Config(
            vocab_size=TOKENS,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **rates,
        )
    if kind == "qwen2":
        return transformers.Qwen2Config(
            vocab_size=TOKENS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    return transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
    )


def write_model(folder: Path, kind: str, dropout: float = 0.0) -> Path:
    """A model with random weights and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config_of(kind, dropout)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
