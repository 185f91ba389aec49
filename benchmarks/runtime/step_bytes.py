"""Bytes that the operations around the optimizer read and write in a step, for each parameter.

    python -m benchmarks.runtime.step_bytes

A small decoder takes a step on the CPU, and every operation that torch dispatches is counted with
the bytes of its arguments. What an operation of a device moves is the same: the code is. Shown are
the operations on gradients, masters, moments and the copies that a model computes with. Those of
activations are left out: they grow with the tokens, not with the parameters.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.config.loading.load import load_config
from holdfast.training.measure.equal_steps import lone_engine, one_step

RUN_FILE = Path(__file__).resolve().parents[2] / "examples/llama3.2-1b/run.yaml"
SMALL = ("model.preset=tiny", "model.vocab_size=512", "data.sequence_length=16", "device=cpu")
SHOWN = {
    "copy_": "gradients copied into the sum",
    "add_": "gradients added to the sum",
    "linalg_vector_norm": "norm",
    "_fused_adamw_": "update",
    "_foreach_copy_": "masters copied to what is computed with",
}


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of all arguments by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.bytes_by_name[function.overloadpacket.__name__] += _bytes(args)
        return function(*args, **(kwargs or {}))


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def measured(precision: str, microbatches: int) -> dict[str, float]:
    """Return the bytes for each parameter by operation, of a step of so many microbatches."""
    changes = [f"train.precision={precision}", f"train.microbatch_size={16 // microbatches}"]
    changes += ["train.compile=false", "train.batch_size=16", *SMALL]
    config = load_config(RUN_FILE, changes).config
    engine = lone_engine(config, torch.device("cpu"))
    engine.initialise(config.seed)
    one_step(engine, config, 1)  # buffers are made in the first one
    with CountedBytes() as counted:
        one_step(engine, config, 2)
    parameters = sum(tensor.numel() for tensor in engine.parameters.master_tensors)
    engine.close()
    return {name: counted.bytes_by_name[name] / parameters for name in SHOWN}


def main() -> None:
    print(f"{'':44}" + "".join(f"{p + ', ' + str(n):>10}" for p, n in CASES))
    found = [measured(precision, number) for precision, number in CASES]
    for name, what in SHOWN.items():
        print(f"{what:44}" + "".join(f"{each[name]:10.1f}" for each in found))
    print(f"{'together':44}" + "".join(f"{sum(each.values()):10.1f}" for each in found))


CASES = (("fp32", 1), ("fp32", 4), ("bf16", 1), ("bf16", 4))
"""Precision, and microbatches of a step."""

if __name__ == "__main__":
    main()
