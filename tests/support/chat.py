"""Small chat data, and the folder of a tokenizer with a chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The form of Qwen and many more: replies are not marked."""

WORDS = ("red", "green", "blue", "seven", "nine", "box", "shell", "river", "é", "日本", "🙂")


def conversation(seed: int, turns: int = 1, words: int = 4) -> list[dict[str, Any]]:
    """Repeatable messages: a system message now and then, and `turns` questions with replies."""
    rng = random.Random(seed)
    said = [{"role": "system", "content": "Answer in few words."}] if seed % 3 == 0 else []
    for turn in range(turns):
        asked = " ".join(rng.choices(WORDS, k=rng.randint(1, words)))
        said.append({"role": "user", "content": f"Say {asked} in turn {turn}, number {seed}."})
        said.append({"role": "assistant", "content": asked + "."})
    return said


def message_rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"messages": conversation(i, 1 + i % 3, **more)} for i in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def tokenizer_folder(
    folder: Path, template: Any = CHATML, eos: str = "<|im_end|>", **settings: Any
) -> Path:
    """A byte-level BPE with the special tokens of ChatML, and its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [m["content"] for i in range(60) for m in conversation(i, 2)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    known: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if template is not None:
        known["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(known | settings), "utf-8")
    return folder
