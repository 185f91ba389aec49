"""Measures what the codecs of outer rounds take on a device. Prints a line of JSON.

python -m holdfast.parallel.outer.codec_times VALUES SHARE DEVICE THREADS CODEC...

{"int8": [seconds of encoding one change, seconds of decoding it], ...}
"""

from __future__ import annotations

import json
import sys
from statistics import median
from time import perf_counter

import torch

from holdfast.parallel.outer.codecs import make_codec

MOST_VALUES = 1 << 22
"""Values of a change that are measured. Times of longer ones are in proportion."""
REPEATS = 7


def measure(values: int, share: float, device: str, codecs: list[str]) -> dict[str, list[float]]:
    """Return the seconds of encoding and of decoding one change, by codec. The calls of codecs
    take turns, so that a busy moment hits all of them."""
    count = min(values, MOST_VALUES)
    change = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(device)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in codecs}
    for _ in range(REPEATS + 1):
        for name in codecs:
            codec = make_codec(name, share)
            start = perf_counter()
            payload = codec.encode(change).cpu()
            encoded = perf_counter()
            codec.decode(payload.to(device), count)[:1].cpu()  # waits for the device
            times[name][0].append(encoded - start)
            times[name][1].append(perf_counter() - encoded)
    scale = values / count
    return {
        name: [scale * median(encode[1:]), scale * median(decode[1:])]  # the first call warms up
        for name, (encode, decode) in times.items()
    }


def main() -> None:
    values, share, device, threads, *codecs = sys.argv[1:]
    torch.set_num_threads(max(1, int(threads)))
    print(json.dumps(measure(int(values), float(share), device, codecs)))


if __name__ == "__main__":
    main()
