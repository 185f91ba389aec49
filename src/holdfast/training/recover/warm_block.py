"""One block of the decoder, run ahead by a standby, while no rank waits for it.

torch's compiler compiles a kind of block once in a process, at its first pass. It then takes the
result for every block of that kind. So a block that is run here and dropped makes the first step
of a worker as short as any other. Shapes, dtype and attention are the run's: for another shape the
compiler would make other kernels, with other bits.
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.devices import device_kind
from holdfast.model.decoder import Decoder
from holdfast.parallel.torch_compat import give_memory
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.task import DecoderTask
from holdfast.training.memory.recompute import apply_recompute

LEAST_FREE = 0.25
"""Share of a device's memory that must be free. A standby shares the device with a worker."""


def has_warm_block(config: RunConfig, device: torch.device) -> bool:
    """Return True if a block can be run ahead, and if that saves time.

    A block that tp, cp or FSDP2 cuts needs the other ranks. Blocks that are not the decoder's, or
    that float8 or moved activations change, are not known here. On a CPU only the compiler takes
    time.
    """
    is_cut = config.layout.cuts_parameters or any(
        degrees.tp > 1 or degrees.cp > 1 for _, degrees in config.layout.kinds
    )
    takes_time = config.train.compile or not device_kind(device.type).is_host
    is_other = config.task.name or config.lora.rank or config.train.memory.moves_activations
    is_other = is_other or Precision.of(config.train.precision).has_float8
    return takes_time and not (is_cut or is_other)


def has_room(device: torch.device) -> bool:
    """Return True if the device's memory has room for a block next to what a worker has there."""
    if device_kind(device.type).is_host:
        return True
    free, total = torch.accelerator.get_memory_info(device)
    return free >= LEAST_FREE * total


def run_block(config: RunConfig, device: torch.device) -> None:
    """Run a block, and the loss of chunks of tokens, as the first step and the first evaluation
    do. Keep nothing of it."""
    model = config.model.model_copy(update={"layers": 1})
    alone = config.model_copy(update={"model": model})
    task, dtype = DecoderTask(alone), Precision.of(config.train.precision).compute
    with torch.device("meta"):
        objective = NextTokenObjective(
            Decoder(model), config.train.compile, config.data.chat.weights, config.train.loss_chunk
        )
    decoder = objective.decoder
    units = task.units(objective)
    # Let units be compiled and run again as in a first stage: the standby's may be another one.
    stages = max(degrees.pp for _, degrees in alone.layout.kinds)
    policy = alone.recompute_policy(0, stages, 1)
    if policy.word != "none":
        apply_recompute(units, policy, is_random=False, is_compiled=alone.train.compile)
    elif alone.train.compile:
        for unit in units:
            unit.compile()
    give_memory(decoder.layers.to(dtype), device)
    for parameter in decoder.layers.parameters():
        torch.nn.init.zeros_(parameter)
    task.fill_constants(objective, device)
    samples, length = config.train.microbatch_size, config.data.sequence_length
    tokens = torch.zeros(samples, length, dtype=torch.int64, device=device)
    x = torch.zeros(samples, length, model.dim, dtype=dtype, device=device, requires_grad=True)
    y = decoder.blocks(x, decoder.attention_context(tokens, x, _documents(config, tokens)))
    torch.autograd.backward(y, torch.zeros_like(y))
    if config.train.compile:
        objective.run_compiled_loss(tokens.flatten(), dtype)
    with torch.no_grad():  # as an evaluation does, later than the first step
        seen = x.detach()
        context = decoder.attention_context(tokens, seen, _documents(config, tokens))
        decoder.blocks(seen, context)
    del objective, decoder, x, y, tokens, seen, context
    gc.collect()
    if not device_kind(device.type).is_host:
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()


def _documents(config: RunConfig, tokens: Tensor) -> Tensor | None:
    """One document in each sample, as the loader numbers them; None: attention ignores them."""
    if config.data.attention != "document":
        return None
    return torch.zeros_like(tokens, dtype=torch.int32)
