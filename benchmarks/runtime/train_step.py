"""A training step of ours against the same step in other loops.

Every loop has our decoder module, equal weights and tokens, fused AdamW and clipping to norm 1, on
two workers with one thread each. `benchmarks/runtime/turns.py` says how they are compared.

    python -m benchmarks.runtime.train_step                     every pair
    python -m benchmarks.runtime.train_step ddp fsdp            some pairs
    python -m benchmarks.runtime.train_step --quick             tiny model, few rounds: does it run?
    python -m benchmarks.runtime.train_step --peers-python P    peers in an environment of their own

A peer that is not installed or does not start is reported with the last line it printed.
"""

from __future__ import annotations

import sys

from benchmarks.runtime.turns import Pair, compare

PAIRS = (
    Pair("ddp", "ddp", "holdfast", "at least 0.98", 0.98),
    Pair("ddp-4", "ddp", "holdfast", "not behind (0.99), 4 microbatches", 0.99, microbatches=4),
    Pair("fsdp", "fsdp", "holdfast-zero3", "at least 0.97", 0.97),
    Pair("accelerate", "accelerate", "holdfast", "not behind (0.99)", 0.99),
    Pair("hf-trainer", "hf-trainer", "holdfast", "not behind (0.99)", 0.99),
    Pair("zero2", "deepspeed-zero2", "holdfast-zero2", "ahead (low end above 1)", 1.0, True),
    Pair("zero3", "deepspeed-zero3", "holdfast-zero3", "ahead (low end above 1)", 1.0, True),
    Pair("torchtitan", "torchtitan", "holdfast-zero3", "not behind (0.99)", 0.99),
    Pair("compile", "holdfast", "holdfast", "gain of compile", 0.0, our_compile=True),
)

if __name__ == "__main__":
    sys.exit(compare(PAIRS, __doc__.splitlines()[0]))
