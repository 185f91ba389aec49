"""A Hugging Face Trainer on Holdfast: a small Llama learns to count. See docs/guide/python.md.

pip install holdfast[hf]
holdfast run train.py --workers 2
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from holdfast.adapters import hf_trainer


class Counting:
    """Sequences that count up from their index, modulo 64."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        ids = (torch.arange(24) * (1 + index % 3) + index) % 64
        return {"input_ids": ids, "labels": ids.clone()}


config = LlamaConfig(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    attn_implementation="eager",
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        output_dir="unused",
        max_steps=60,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=5e-3,
        warmup_steps=10,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Counting(),
)
hf_trainer.train(trainer, version="counting-1")
