"""Peak memory of an export: `python benchmarks/runtime/export.py`.

The checkpoint has the number of tensors and the shape of a 3 B decoder (Llama 3.2 3B: 28 blocks of
9 tensors, embedding tied). Its width is reduced so that it has `--megabytes` of weights.
`--writers` writers make it side by side, with AdamW's moments (the file is three times the
weights). Bytes and files are real. Then a process of its own exports it. The process reports its
peak resident memory (VmHWM) before it opens the checkpoint, with torch loaded, and at its end. The
difference is the memory of exporting. The bar is a few shards of `--shard-megabytes`, for any size
of the model.

The output also has the memory of `transformers` itself: it saves the same weights from one complete
model in memory, which is at least `weights` bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.format.blob import blob_header
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.save.writer import try_commit, write_part
from holdfast.config.run import RunConfig
from holdfast.core.format.manifest import place_boxes
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import state_table
from holdfast.layout import Layout, place_layout
from holdfast.wire.store.run_store import FolderStore

LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY = 28, 24, 8, 8192 / 3072, 128256 / 3072
MIB = 2**20
CHUNK = os.urandom(MIB)

CHILD = """
import json, sys
from pathlib import Path
import torch
from holdfast.launch.run.runs import open_run
from holdfast.export.weights import write_folder
from holdfast.model import dcp_export, huggingface
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
form, folder, to, shard = sys.argv[1:5]
run = open_run(Path(folder))
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
checkpoint = Checkpoint.open(run.store, list_commits(run.store)[0])
before = peak()
if form == "hf":
    write_folder(Path(to), run, checkpoint, None, None, int(shard))
else:
    from holdfast.export.dcp import write_dcp_folder
    write_dcp_folder(Path(to), run, checkpoint, "holdfast")
print(json.dumps([before, peak()]))
"""


def config_of(megabytes: int) -> RunConfig:
    """The width that gives about so many MiB of fp32 weights."""
    dim = 96
    while True:
        shape = {
            "preset": None,
            "layers": LAYERS,
            "dim": dim,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "ffn_dim": round(dim * FFN),
            "vocab_size": round(dim * VOCABULARY),
            "tied_embeddings": True,
        }
        config = RunConfig.model_validate(
            {"name": "export", "model": shape, "data": {"sources": [{"kind": "text", "path": "."}]}}
        )
        if 4 * count_parameters(config.model) >= megabytes * MIB:
            return config
        dim += 48


def make(folder: Path, config: RunConfig, writers: int) -> None:
    """A run folder with one checkpoint, as the mover writes it."""
    layout = Layout(dp_shard=writers)
    topology = place_layout(layout, 1, ("node",) * writers)
    table = state_table(config.model)
    plan = SaveContext(1, topology, table, "", "", 16 * MIB)
    store = FolderStore(folder)
    for rank, boxes in sorted(Ownership(topology, table).by_rank()):
        tensors = place_boxes(boxes, table)
        head = blob_header(tensors)

        def content(
            head: bytes = head, size: int = sum(p.nbytes for p in tensors)
        ) -> Iterator[bytes]:
            yield head
            for start in range(0, size, MIB):
                yield CHUNK[: size - start]

        write_part(store, plan, 1, rank, content(), len(head), tensors, {})
    assert try_commit(store, plan, 1) is not None
    resolved = {"config": config.model_dump(mode="json"), "dataset": {"folder": "", "version": ""}}
    (folder / "resolved.json").write_text(json.dumps(resolved))


def export(form: str, run: Path, to: Path, shard: int) -> dict[str, float]:
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, form, str(run), str(to), str(shard)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    before, after = json.loads(done.stdout.splitlines()[-1])
    seconds = time.perf_counter() - begun
    written = sum(path.stat().st_size for path in to.iterdir())
    return {
        "wall_seconds": round(seconds, 2),
        "written_MiB": round(written / MIB, 1),
        "files": len(list(to.iterdir())),
        "before_MiB": round(before / MIB, 1),
        "peak_MiB": round(after / MIB, 1),
        "added_MiB": round((after - before) / MIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of an export.")
    parser.add_argument("--megabytes", type=int, default=1024, help="of weights")
    parser.add_argument("--shard-megabytes", type=int, default=128)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to work; none: a temporary folder")
    options = parser.parse_args()
    config = config_of(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        run = Path(made) / "run"
        run.mkdir()
        make(run, config, options.writers)
        weights = 4 * count_parameters(config.model)
        tensors = len(state_table(config.model)) // 3
        print(
            f"{tensors} tensors, dim {config.model.dim}, {weights / MIB:.0f} MiB of weights, "
            f"{options.writers} writers, shards of {options.shard_megabytes} MiB"
        )
        for form in ("hf", "dcp"):
            to = Path(made) / form
            found = export(form, run, to, options.shard_megabytes * MIB)
            shards = found["added_MiB"] / options.shard_megabytes
            row = ", ".join(f"{name} {value}" for name, value in found.items())
            print(f"{form:4} {row}, added in shards {shards:.2f}", flush=True)
            shutil.rmtree(to)


if __name__ == "__main__":
    main()
