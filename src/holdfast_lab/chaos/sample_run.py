"""The run that is disturbed by default: a tiny model on made-up text."""

from __future__ import annotations

import os
import random
from pathlib import Path

from holdfast.errors import RunFolderError

RUN_FILE = "run.yaml"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rain", "falls")
SAMPLE_HEAD = """\
name: %s
folder: {root}/run
device: cpu
data:
  folder: {root}/dataset
  sources:
    - {{kind: text, path: "{root}/texts"}}
  tokenizer: {{vocab_size: %d}}
  sequence_length: %d
  validation_fraction: 0.2
  processes: 1
"""
"""A run file on made-up text begins so: %: name, vocabulary, tokens of a sample; {root}: folder."""
_TEXT = (
    SAMPLE_HEAD % ("chaos", 300, 16)
    + """\
model: {{preset: null, layers: 4, dim: 16, heads: 2, kv_heads: 2, ffn_dim: 24}}
train: {{batch_size: 12, microbatch_size: 2, optimizer: {{clip_norm: 0.05}}}}
"""
)
SAMPLE_OVERRIDES = (
    "train.precision=float64",
    "train.evaluate.every=0",
    "checkpoint.every_steps=10",
    "checkpoint.memory_every_steps=1",
)
"""Settings of every disturbed run and its undisturbed counterpart. In float64 another layout
changes only rounding of 1e-10, and memory holds every step."""
EXPERT_OVERRIDES = (
    "model.family=dots1",
    "model.qk_norm=true",
    "model.experts={count: 4, top_k: 2, width: 16, scores: sigmoid, shared: 1, first: 2,"
    " choice_bias: true, bias_rate: 0.01}",
)
"""Settings of this run if some layout of the campaign spreads experts: two blocks have them."""


def run_file_text(root: Path) -> str:
    """What the run file in `root` says, or would say."""
    return _TEXT.format(root=root.absolute())


def write_run_file(root: Path, documents: int = 12) -> Path:
    """Texts and a run file in `root`, unless they are there.

    Raises RunFolderError where a run file lies there that is not of our making."""
    path, texts = root / RUN_FILE, root / "texts"
    if path.exists():
        if not _is_ours(path.read_bytes()):
            raise RunFolderError(
                "a run file lies here that 'holdfast chaos' did not write",
                where=str(path),
                remedy=f"disturb it with: holdfast chaos {path}, or name another --out",
            )
        return path
    write_texts(texts, documents, 120)
    new = root / f".{path.name}.{os.getpid()}"  # another shard may look for it now
    new.write_text(run_file_text(root), "utf-8")
    new.replace(path)
    return path


def write_texts(folder: Path, documents: int, words: int) -> Path:
    """Fill a folder with made-up text, the same each time; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(7)
    for number in range(documents):
        text = " ".join(chooser.choice(WORDS) for _ in range(words))
        (folder / f"{number}.txt").write_text(f"Text {number}. {text}.\n")
    return folder


def _is_ours(text: bytes) -> bool:
    """Whether it is our text, of whatever folder: one may have been moved, or have two names."""
    before, after = "\nfolder: ", "/run\n"
    root = text.decode("utf-8", "replace").partition(before)[2].partition(after)[0]
    return text == _TEXT.format(root=root).encode()
