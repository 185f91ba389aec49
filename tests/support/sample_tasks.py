"""Tasks of users. A test copies this file into a folder with a run file, as a user would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast

SAMPLES, WIDTH, CLASSES = 96, 12, 5


class Rows:
    """Samples that are a function of their index: features and a class that follows from them."""

    version = "rows-1"

    def __init__(
        self, samples: int = SAMPLES, shape: tuple[int, ...] = (WIDTH,), first: int = 0
    ) -> None:
        self._samples, self._shape, self._first = samples, shape, first

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(self._first + index)
        x = torch.randn(self._shape, generator=generator)
        return {"x": x, "y": int(x.sum() > 0) + 2 * int(x.max() > 1.5)}


class Classifier(holdfast.Task):
    """What the tasks below share: cross entropy, summed over samples."""

    def data(self) -> Rows:
        return Rows()

    def validation(self) -> Rows:
        return Rows(9, first=SAMPLES)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


class Gru(Classifier):
    """A recurrent net. hidden: its width."""

    def __init__(self, hidden: int = 8) -> None:
        self.hidden = hidden

    def model(self) -> nn.Module:
        return GruNet(self.hidden)


class GruNet(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(3, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(x.view(len(x), -1, 3))[0][:, -1])
        return out


class Convolution(Classifier):
    """A convolutional net with a buffer that stays as it is, and a norm without statistics."""

    def data(self) -> Rows:
        return Rows(shape=(1, 6, 6))

    def validation(self) -> Rows:
        return Rows(9, (1, 6, 6), SAMPLES)

    def model(self) -> nn.Module:
        return ConvolutionNet()


class ConvolutionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)]
        )
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4).view(4, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head((self.norm(x) * self.scale).mean((2, 3)))
        return out


class Normed(Convolution):
    """The same with batch normalisation, whose running statistics are merged."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, CLASSES),
        )

    def merge(self, buffer: str) -> Literal["mean", "sum"]:
        return "sum" if buffer.endswith("num_batches_tracked") else "mean"


class NormedUnits(Normed):
    """The same with units, one of which changes merged buffers."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())[:2]


class Tied(Classifier):
    """Dropout, an output matrix tied to the input's, a frozen part, and a part without use. With
    `sometimes`, one that only some microbatches use."""

    def __init__(self, dropout: float = 0.2, sometimes: bool = True) -> None:
        self.dropout, self.sometimes = dropout, sometimes

    def model(self) -> nn.Module:
        return TiedNet(self.dropout, self.sometimes)

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        return name == "inner.0.weight"

    def initial(self, name: str, shape: tuple[int, ...]) -> holdfast.Normal | None:
        return holdfast.Normal(0.3) if name == "first.weight" else None


class TiedNet(nn.Module):
    def __init__(self, dropout: float, sometimes: bool) -> None:
        super().__init__()
        self.dropout, self.is_selective = dropout, sometimes
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), self.dropout, training=True)
        for layer in self.inner:
            x = torch.tanh(layer(x)) + self.frozen(x)
        if self.is_selective and float(x.detach().sum()) > 0:
            x = x + self.sometimes(x)
        out: Tensor = self.last(x)[:, :CLASSES]
        return out


class Named(Tied):
    """Says what it costs, and how its parameters are called elsewhere; `unused` is left out."""

    def flops(self) -> float:
        return 6.0 * 5 * WIDTH * WIDTH

    def exported(self, name: str) -> str | None:
        return None if name.startswith("unused.") else f"net.{name}"


class Sequences(Rows):
    """Short sequences of tokens that count on from a first one."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(self._first + index)
        first = int(torch.randint(0, WIDTH, (), generator=generator))
        return {"tokens": (torch.arange(9) * (1 + index % 3) + first) % WIDTH}


class EncoderDecoder(holdfast.Task):
    """An encoder and a decoder with cross attention; the weight is the tokens."""

    def __init__(self, dropout: float = 0.1) -> None:
        self.dropout = dropout

    def data(self) -> Sequences:
        return Sequences()

    def validation(self) -> Sequences:
        return Sequences(9, first=SAMPLES)

    def model(self) -> nn.Module:
        return EncoderDecoderNet(self.dropout)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return 4 * len(batch["tokens"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits = model(tokens[:, :4], tokens[:, 4:8])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 5:].flatten(), reduction="sum")


class Weighted(EncoderDecoder):
    """The same with a weight for each token, and without random numbers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(token_weights(batch).sum())

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits = model(tokens[:, :4], tokens[:, 4:8])
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 5:], reduction="none")
        return (losses * token_weights(batch)).sum()


def token_weights(batch: Mapping[str, Tensor]) -> Tensor:
    """[samples, 4]: a tenth of the token, and none for the token 0."""
    return batch["tokens"][:, 5:] / 10


class EncoderDecoderNet(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, 8)
        self.both = nn.Transformer(8, 2, 2, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.both(self.embed(source), self.embed(target), tgt_mask=self.mask)
        out: Tensor = self.head(x)
        return out


class Gpt2(EncoderDecoder):
    """GPT-2 of transformers, with its dropout and its tied head."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        rates = {f"{name}_pdrop": self.dropout for name in ("resid", "embd", "attn")}
        config = GPT2Config(
            vocab_size=WIDTH,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            use_cache=False,
            **rates,
        )
        return GPT2LMHeadModel(config)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return 8 * len(batch["tokens"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits = model(input_ids=tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


class Planned(Gpt2):
    """A model of transformers with its own plan for tensor parallelism. kind: its family."""

    def __init__(self, kind: str = "Qwen2") -> None:
        super().__init__(dropout=0.0)
        self.kind = kind

    def model(self) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(
            vocab_size=WIDTH,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            use_cache=False,
        )
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return made

    def casts(self, buffer: str) -> bool:
        return False

    def sharding(self) -> Mapping[str, str | tuple[str, int]]:
        from holdfast.tasks.huggingface import tensor_plan

        with torch.device("meta"):
            return tensor_plan(self.model())


class Heads(EncoderDecoder):
    """Decoder blocks with a sharding table. Attention has a norm inside, and the output matrix is
    that of the embeddings. dropout: inside the cut layers and outside. table: whether it has one.
    """

    def __init__(self, dropout: float = 0.0, table: bool = True) -> None:
        super().__init__(dropout)
        self.table = table

    def model(self) -> nn.Module:
        return HeadsNet(self.dropout)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return 8 * len(batch["tokens"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def sharding(self) -> dict[str, str | tuple[str, int]]:
        if not self.table:
            return {}
        return {
            "embed": "embedding_rowwise",
            "blocks.*.[qkv]": ("colwise", 4),
            "blocks.*.norm": "replicated_with_grad_allreduce",
            "blocks.*.o": ("rowwise", 4),
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_gather_output",
        }


class Stack(holdfast.PipelineTask):
    """A tagger: a class for each token, by encoder blocks that see the complete sequence. The
    output matrix is that of the embeddings. forgets: a part that `pipeline()` leaves out. shares:
    one block is at all positions."""

    def __init__(
        self, dropout: float = 0.1, layers: int = 4, forgets: str = "", shares: bool = False
    ) -> None:
        self.dropout, self.layers, self.forgets, self.shares = dropout, layers, forgets, shares

    def data(self) -> Sequences:
        return Sequences()

    def validation(self) -> Sequences:
        return Sequences(9, first=SAMPLES)

    def model(self) -> nn.Module:
        net = StackNet(self.dropout, self.layers)
        if self.shares:
            net.encoder.blocks = nn.ModuleList([net.encoder.blocks[0]] * self.layers)
        return net

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return 8 * len(batch["tokens"])

    def pipeline(self) -> holdfast.PipelineTask.Parts:
        after = [name for name in ("norm", "head") if name != self.forgets]
        ends = ["embed", "places"], after
        return holdfast.PipelineTask.Parts("encoder.blocks", *ends)

    def before(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        x: Tensor = model.embed(batch["tokens"][:, :-1]) + model.places
        return F.dropout(x, self.dropout, model.training)

    def block(self, block: nn.Module, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = block(x, src_key_padding_mask=batch["tokens"][:, :-1] == 3)
        return out

    def after(self, model: nn.Module, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        logits, targets = model.head(model.norm(x)), batch["tokens"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class StackNet(nn.Module):
    def __init__(self, dropout: float, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, 8)
        self.places = nn.Parameter(torch.randn(8, 8))
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WIDTH, bias=False)
        self.head.weight = self.embed.weight


class HeadsNet(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, 8)
        self.places = nn.Parameter(torch.randn(8, 8))
        self.blocks = nn.ModuleList(HeadsBlock(dropout) for _ in range(2))
        self.head = nn.Linear(8, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class HeadsBlock(nn.Module):
    """Four heads of two numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=name != "k") for name in "qkv")
        self.norm = nn.LayerNorm(2)
        self.o = nn.Linear(8, 8)
        self.before = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        rate = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.o(seen.transpose(1, 2).flatten(2)))
        inner = self.dropout(F.gelu(self.up(self.before(x))))
        out: Tensor = x + self.dropout(self.down(inner))
        return out
