"""Time of a generated token as a multiple of a floor: the products of the weights alone.

The floor multiplies each matrix of the model once with as many rows as there are slots, as torch
lays weights out. It leaves out attention, norms and the draw of a token. One thread, float32, CPU
seconds. Each round times the floor and a step of `PolicyDecoder` in turn; the table has medians.

    python -m benchmarks.runtime.decoding [--shapes tiny small 15m] [--slots 1 8] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise
from holdfast.rollout.decode.policy import PolicyDecoder
from holdfast.rollout.messages import CompletionKey, CompletionRequest, Sampling

VOCABULARY, PROMPT, TOKENS = 4096, 32, 64


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(shape: str, slots: int, rounds: int) -> tuple[float, float, float]:
    """Median CPU seconds: (of the floor of one step, of one step, of one load of the weights)."""
    model = ModelConfig.model_validate({"preset": shape, "vocab_size": VOCABULARY})
    with torch.device("meta"):
        source = Decoder(model)
    source.to_empty(device="cpu")
    initialise(source, 1)
    state = source.state_dict()
    matrices = [weight for weight in state.values() if weight.dim() == 2]
    inputs = [torch.randn(slots, weight.shape[1]) for weight in matrices]
    decoder = PolicyDecoder(model, torch.device("cpu"), slots=slots, max_length=PROMPT + TOKENS + 1)

    def floor() -> None:
        for _ in range(TOKENS):
            for weight, rows in zip(matrices, inputs, strict=True):
                F.linear(rows, weight)

    def steps() -> None:
        for _ in range(TOKENS):
            decoder.step()

    found: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        load = seconds(lambda: decoder.load(state))
        for slot in range(slots):
            key = CompletionKey(0, number, 0, slot)
            decoder.start(CompletionRequest(key, (1,) * PROMPT, Sampling(TOKENS + 1)), 0)
        found.append((seconds(floor) / TOKENS, seconds(steps) / TOKENS, load))
        decoder.cancel()
    medians = [statistics.median(values) for values in zip(*found[1:], strict=True)]
    return medians[0], medians[1], medians[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["tiny", "small", "15m"])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| shape | slots | floor, ms a step | step, ms | step / floor | tokens/s | load, ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for shape in arguments.shapes:
        for slots in arguments.slots:
            floor, step, load = measure(shape, slots, arguments.rounds)
            print(
                f"| {shape} | {slots} | {floor * 1e3:.2f} | {step * 1e3:.2f} | {step / floor:.2f} "
                f"| {slots / step:.0f} | {load * 1e3:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
