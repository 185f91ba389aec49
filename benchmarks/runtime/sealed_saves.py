"""Cost of sealing a run folder: `python -m benchmarks.runtime.sealed_saves [--megabytes N]`.

A blob of random bytes is created in a plain folder and in a sealed one, and read back, in pairs
that take turns. The output has the medians of seconds and CPU seconds of each. The floor of the
difference is AES-256-GCM of the same bytes in memory, in pieces of one extent.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast.wire.store.encrypted_store import EXTENT_BYTES, EncryptedStore
from holdfast.wire.store.run_store import FolderStore, RunStore

READ_BYTES = 8 << 20


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds and CPU seconds of a call."""
    begun, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - cpu


def read(store: RunStore, key: str, size: int) -> None:
    out = memoryview(bytearray(READ_BYTES))
    for start in range(0, size, READ_BYTES):
        store.read_into(key, start, out[: min(READ_BYTES, size - start)])


def seal_in_memory(data: memoryview) -> None:
    cipher = AESGCM(secrets.token_bytes(32))
    for number, start in enumerate(range(0, len(data), EXTENT_BYTES)):
        cipher.encrypt(number.to_bytes(12, "big"), data[start : start + EXTENT_BYTES], b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    size = options.megabytes << 20
    data = memoryview(os.urandom(size))
    rows: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain = FolderStore(folder)
        stores: dict[str, RunStore] = {
            "plain": plain,
            "sealed": EncryptedStore(plain, secrets.token_bytes(32)),
        }
        for number in range(options.rounds):
            rows.setdefault("AES in memory", []).append(timed(lambda: seal_in_memory(data)))
            for name, store in stores.items():
                key = f"data/0000000001/{number}-{name}"

                def save(store: RunStore = store, key: str = key) -> None:
                    step = 16 << 20
                    store.create(key, (data[at : at + step] for at in range(0, size, step)))

                rows.setdefault(f"save, {name}", []).append(timed(save))
                load = timed(lambda store=store, key=key: read(store, key, size))  # type: ignore[misc]
                rows.setdefault(f"load, {name}", []).append(load)
                store.delete(key)
    for name, found in rows.items():
        seconds, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        least = min(value[1] for value in found)
        print(
            f"{name:16} {seconds:.3f} s, {cpu:.3f} CPU s (least {least:.3f}), "
            f"{size / cpu / 1e9:.2f} GB a CPU second"
        )


if __name__ == "__main__":
    main()
