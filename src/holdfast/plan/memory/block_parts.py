"""What else a run file says about the bytes that a block keeps: the letters of `activations.py`.

documents    attention's results of each document, which are joined: i T Q. The kernel of an
             accelerator in 16 bits takes all documents at once, and needs none of it
window       a mask of each block that attends within fewer tokens than a sample has: i S S.
softcap      no fused kernel: q, and a copy of k and v for each query head, 4 i T Q with the
             result. Of the scores H T S their tanh and softmax, in bf16 twice. S S of a mask.
both norms   two norms more.
compiled     i T (4 D + 2 Q + 2 K + 3 F) + w T (H + 2). That is the cut with the fewest bytes
             through the graph of a block. It keeps its input, attention's result behind `o`,
             both norms' results, gate, up and their product. Norms and silu are computed again
adapters     a frozen norm: w R (D + 1), fused as before. A frozen product keeps no input. An
             adapter keeps its input and i T r, with dropout i T more of each input element and
             a byte for the mask. A stream that no adapter is before has no gradient, so
             nothing of it is kept
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.core.sharding.adapters import adapted_layers


def options_of_attention(config: RunConfig) -> tuple[str, ...]:
    """Return the keys that give a run another attention than that of all tokens before."""
    model, data = config.model, config.data
    return (
        *(["data.attention document"] if data.attention == "document" else []),
        *(["model.window"] if model.windowed and model.window < data.sequence_length else []),
        *(["model.attention_softcap"] if model.attention_softcap else []),
    )


def clashing_options(config: RunConfig) -> str:
    """Return two options of blocks that have no formula together; "" if there are none. A limit or
    a window inside of documents depends on their lengths, except in the kernel of all of them. What
    a compiled block keeps is known of plain ones."""
    options, train, model = options_of_attention(config), config.train, config.model
    has_documents = config.data.attention == "document"
    takes_all = _takes_all_documents(config)
    if has_documents and len(options) > 1 and not takes_all:
        return " with ".join(options[:2])
    if train.compile:
        others = [option for option in options if option != "data.attention document"]
        others += [f"model.norms {model.norms}"] * (model.norms != "pre")
        others += ["lora"] * bool(config.lora.rank)
        if others:
            return f"train.compile with {others[0]}"
    if config.lora.rank and train.memory.moves_activations:
        return "lora with train.memory.activations"
    if config.lora.rank and "selective" in train.recompute_words:
        return "lora with train.recompute selective"
    return ""


def _takes_all_documents(config: RunConfig) -> bool:
    """Return True if one kernel of the device takes all documents (`model/documents.py`)."""
    is_short = config.train.precision in ("bf16", "fp16")
    is_device = config.device not in ("cpu", "auto")
    return is_device and is_short and not config.model.attention_softcap


QUERY_KEY_VALUE = ("attention.q", "attention.k", "attention.v")
GATE_UP = ("ffn.gate", "ffn.up")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run."""

    rank: int
    has_dropout: bool
    blocks: tuple[frozenset[str], ...]  # of each block, its layers with one

    @staticmethod
    def of(config: RunConfig) -> Adapters | None:
        """Return None for a run that trains all weights."""
        lora, model = config.lora, config.model
        if not lora.rank or config.task.name:
            return None
        names = [set[str]() for _ in range(model.layers)]
        for layer in adapted_layers(model, lora):
            _, number, name = layer.split(".", 2)
            names[int(number)].add(name)
        return Adapters(lora.rank, lora.dropout > 0, tuple(map(frozenset, names)))

    def starts(self) -> Iterator[bool]:
        """Return for each block whether what comes in has a gradient."""
        has_gradient = False
        for names in self.blocks:
            yield has_gradient
            has_gradient |= bool(names)


@dataclass(frozen=True)
class BlockOptions:
    """What of a run file changes the bytes that a block keeps."""

    has_documents: bool = False  # each attends by itself, in a kernel of its own
    is_compiled: bool = False
    softcap: bool = False
    norms: int = 2  # of a block, without those of heads
    sequence: int = 0  # tokens of a sample
    masked: float = 0.0  # share of the blocks that have a mask of a window
    adapters: Adapters | None = None
    scales_loss: bool = False

    @staticmethod
    def of(config: RunConfig, device: str) -> BlockOptions:
        """device: "cpu", or "accelerator"."""
        model, length = config.model, config.data.sequence_length
        in_documents = config.data.attention == "document"
        masked = len(model.windowed) / model.layers if 0 < model.window < length else 0.0
        return BlockOptions(
            in_documents and not (device != "cpu" and _takes_all_documents(config)),
            config.train.compile,
            bool(model.attention_softcap),
            4 if model.norms == "both" else 2,
            length,
            0.0 if in_documents else masked,
            Adapters.of(config),
            config.train.precision == "fp16",
        )


PLAIN = BlockOptions()
