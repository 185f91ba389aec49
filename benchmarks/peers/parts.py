"""Our decoder's modules without its own forward, for loops that spread them by other means."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.peers.work import blocks_of
from holdfast.model.decoder import Decoder


class Parts(nn.Module):
    """The complete decoder, or one stage of a pipeline; what is not here is None.

    blocks: of the stage, in order (None: all). The first stage has the embedding, the last one
    norm and head. Parameters keep the decoder's names.
    """

    def __init__(self, decoder: Decoder, blocks: range | None = None):
        super().__init__()
        if decoder.head is None:
            raise ValueError("the parts are those of untied embeddings")
        every = blocks_of(decoder)
        held = range(len(every)) if blocks is None else blocks
        first, last = held.start == 0, held.stop == len(every)
        self.embed = decoder.embed if first else None
        self.layers = nn.ModuleDict({str(i): every[i] for i in held})
        self.norm = decoder.norm if last else None
        self.head = decoder.head if last else None
        self.rotary = decoder.rotary

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage. Input: tokens [B, S] on the first stage, [B, S, D] on later ones. Output:
        logits [B, S, V] on the last stage, [B, S, D] on earlier ones."""
        length = x.shape[1]  # all of S: with sequence parallelism the embedding gives a part
        if self.embed is not None:
            x = self.embed(x)
        rotary = self.rotary(length, None, x)
        for block in self.layers.values():
            x = block(x, rotary, None)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)
