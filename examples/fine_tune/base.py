"""A tiny Llama in a Hugging Face folder, in the place of a model that you would download.

Its weights are random, so it says nothing useful yet. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_base(folder: Path, texts: Iterable[str]) -> None:
    """Write model, tokenizer and chat template. texts: what the tokenizer learns its words from."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    torch.manual_seed(0)
    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def texts_of(rows: Path) -> list[str]:
    """The texts of rows of messages."""
    return [m["content"] for line in rows.open() for m in json.loads(line)["messages"]]


if __name__ == "__main__":
    write_base(Path(sys.argv[1]), texts_of(Path(__file__).with_name("chat.jsonl")))
