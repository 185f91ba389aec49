"""A minimal DDP loop under torchrun, for `benchmarks.runtime.slurm`: one step of a run file's
model.

torchrun ... benchmarks/runtime/slurm_ddp.py RUN_FILE OUT   rank 0 writes the time of its first step
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from holdfast.config.loading.load import load_config
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise


def main(run_file: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = load_config(run_file, []).config
    with torch.device("meta"):
        decoder = Decoder(config.model.model_copy(update={"vocab_size": 300}))
    decoder.to_empty(device="cpu")
    initialise(decoder, 0)
    model = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 300, (1, config.data.sequence_length + 1))
    logits = model(tokens[:, :-1])
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        out.write_text(str(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
