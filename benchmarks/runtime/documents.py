"""Memory and time of attention over packed documents, next to a dense mask of [S, S].

    python -m benchmarks.runtime.documents [--mean 512] [--rounds 5] [--device cuda]

One attention layer (width 512, 8 query heads, 4 key/value heads) runs forward and backward on a row
of S tokens. The row's documents have lengths that are drawn around a mean. Memory is the peak above
what the process held before. On a CPU that is the resident size of a process of its own. On a
device it is what torch allocated. Time is the median of a few rounds, in which both ways take turns
on one thread. The outputs and the gradients of both ways are compared first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tests.support.models import document_mask
from torch import Tensor

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Attention, Mask
from holdfast.model.documents import (
    DocumentAttention,
    choose_document_attention,
    document_positions,
)
from holdfast.model.rotary import RotaryTable

LENGTHS = (2048, 4096, 8192)
WARM_UP = 64  # tokens of a first pass, whose memory is not counted
MIB = 2**20


def drawn_documents(length: int, mean: int) -> Tensor:
    """The number of each token's document: [1, length]"""
    draw, numbers = random.Random(1), list[int]()
    while len(numbers) < length:
        size = max(16, round(draw.expovariate(1 / mean)))
        numbers += [numbers[-1] + 1 if numbers else 0] * size
    return torch.tensor([numbers[:length]])


class Layer:
    """One attention layer with a row of tokens. dense: with the mask; otherwise as `how` says."""

    def __init__(self, length: int, mean: int, dense: bool, how: DocumentAttention, device: str):
        self.model = model_config()
        self.attention = Attention(self.model).to(device, compute_dtype(device))
        generator = torch.Generator().manual_seed(2)
        for parameter in self.attention.parameters():
            value = torch.randn(parameter.shape, generator=generator) / 512**0.5
            parameter.data.copy_(value)
        self.x = torch.randn(1, length, 512, generator=generator).to(parameter)
        self.documents = drawn_documents(length, mean).to(device)
        self.dense, self.how = dense, how

    def run(self, length: int = 0) -> tuple[Tensor, Tensor]:
        """Forward and backward over the first `length` tokens (0: all). Return the output and
        the gradient of what came in."""
        size = length or self.x.shape[1]
        x = self.x[:, :size].clone().requires_grad_()
        documents = self.documents[:, :size]
        rotary = RotaryTable(self.model)(size, document_positions(documents), x)
        mask: Mask = document_mask(documents) if self.dense else self.how.pack(documents)
        out = self.attention(x, rotary, mask)
        out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad


def model_config() -> ModelConfig:
    shape = {"dim": 512, "heads": 8, "kv_heads": 4, "layers": 1, "ffn_dim": 512}
    return ModelConfig.model_validate({"preset": None, "vocab_size": 8, **shape})


def compute_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def chosen(device: str) -> DocumentAttention:
    return choose_document_attention(model_config(), compute_dtype(device), torch.device(device))


def peak_bytes(length: int, mean: int, dense: bool, device: str) -> int:
    """Bytes above what was held before one forward and backward. Call it in a new process."""
    torch.set_num_threads(1)
    layer = Layer(length, mean, dense, chosen(device), device)
    layer.run(WARM_UP)
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        layer.run()
        return torch.accelerator.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at the present size
    before = _status_bytes("VmRSS")
    layer.run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def median_seconds(layers: dict[str, Layer], rounds: int, device: str) -> dict[str, float]:
    """Of each way; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            began = time.perf_counter()
            layer.run()
            if device != "cpu":
                torch.accelerator.synchronize()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def furthest(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """The largest difference, as a part of the largest number."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean", type=int, default=512, help="tokens of a document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    how, device = chosen(given.device), given.device
    print(f"documents of {given.mean} tokens on average; {how.way}: {how.reason}")
    print(f"{'S':>6}{'documents':>11}{'MiB':>9}{'dense':>9}{'ms':>9}{'dense':>9}  difference")
    for length in LENGTHS:
        peaks = []
        for dense in (False, True):
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                peaks.append(alone.submit(peak_bytes, length, given.mean, dense, device).result())
        layers = {
            name: Layer(length, given.mean, name == "dense", how, device)
            for name in (how.way, "dense")
        }
        apart = furthest(*(layer.run() for layer in layers.values()))
        seconds = median_seconds(layers, given.rounds, device)
        count = len(how.pack(layers["dense"].documents).lengths)
        numbers = "".join(f"{peak / MIB:>9.1f}" for peak in peaks)
        numbers += "".join(f"{seconds[name] * 1e3:>9.1f}" for name in layers)
        print(f"{length:>6}{count:>11}{numbers}  {apart:.1e}")


if __name__ == "__main__":
    main()
