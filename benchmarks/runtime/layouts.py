"""A training step under each axis of a layout, against the same axis in other loops.

The axes are tp2 (tensor with sequence parallelism), cp2 (by an all-gather, a ring, and Ulysses),
and ep2 (8 experts). There are also pp2 (8 microbatches, each schedule) and dp_shard2 (4
microbatches under ZeRO 2, gradients added up once a step).
In `ep2-copies` most tokens take one expert of a block, and ours with copies of it is compared with
ours without. `ulysses-ring` has no row: with two workers it is one of its halves.

There are two workers with one thread each. The other loops are by hand from PyTorch's own pieces
(parallelize_module, collectives, the pipelining schedules, fully_shard), in DeepSpeed and with
torchtitan's plans. Every loop has the same weights, decoder maths and tokens, fused AdamW, and
clipping to norm 1 over the complete gradient.
`benchmarks/runtime/turns.py` says how they are compared, `peers/floor.py` what the floor is.

    python -m benchmarks.runtime.layouts                      every pair
    python -m benchmarks.runtime.layouts tp2 pp2              some pairs
    python -m benchmarks.runtime.layouts --row-seconds 150    at most about three minutes a pair
    python -m benchmarks.runtime.layouts --quick              tiny model, few rounds: does it run?
    python -m benchmarks.runtime.layouts --peers-python P     peers in an environment of their own

A peer that is not installed or does not start is reported with the last line it printed.
"""

from __future__ import annotations

import sys

from benchmarks.runtime.turns import Pair, compare

HAND, AHEAD = "at least 0.97", "ahead (low end above 1)"

PAIRS = (
    Pair("tp2", "tensor", "holdfast-tp2", HAND, 0.97, floor="floor-tp2"),
    Pair("cp2", "context", "holdfast-cp2", HAND, 0.97, floor="floor-dp2"),
    Pair("cp2-ring", "context", "holdfast-cp2-ring", HAND, 0.97, floor="floor-dp2"),
    Pair("cp2-ulysses", "ulysses", "holdfast-cp2-ulysses", HAND, 0.97, floor="floor-dp2"),
    Pair("ep2", "experts", "holdfast-ep2", HAND, 0.97, experts=8),
    Pair(
        "ep2-copies",
        "holdfast-ep2",
        "holdfast-ep2-copies",
        AHEAD,
        1.0,
        True,
        experts=8,
        skewed=True,
    ),
    Pair("pp2", "pipeline-1f1b", "holdfast-pp2", HAND, 0.97, microbatches=8, floor="floor-pp2"),
    Pair(
        "pp2-gpipe",
        "pipeline-gpipe",
        "holdfast-pp2-gpipe",
        HAND,
        0.97,
        microbatches=8,
        floor="floor-pp2",
    ),
    *(
        Pair(
            f"pp2-{name}",
            f"pipeline-{name}",
            f"holdfast-pp2-{name}",
            HAND,
            0.97,
            microbatches=8,
            floor="floor-pp2",
        )
        for name in ("interleaved", "zb-h1", "zbv", "dualpipev")
    ),
    Pair("dp_shard2", "fsdp", "holdfast-zero3", HAND, 0.97, floor="floor-dp2"),
    Pair(
        "zero2-accumulated",
        "fsdp-zero2",
        "holdfast-zero2-step",
        HAND,
        0.97,
        microbatches=4,
        floor="floor-dp2",
    ),
    Pair("deepspeed-tp2", "deepspeed-tp2", "holdfast-tp2", AHEAD, 1.0, True, floor="floor-tp2"),
    Pair(
        "deepspeed-pp2",
        "deepspeed-pp2",
        "holdfast-pp2",
        AHEAD,
        1.0,
        True,
        microbatches=8,
        floor="floor-pp2",
    ),
    Pair(
        "deepspeed-zero2", "deepspeed-zero2", "holdfast-zero2", AHEAD, 1.0, True, floor="floor-dp2"
    ),
    Pair(
        "deepspeed-zero3", "deepspeed-zero3", "holdfast-zero3", AHEAD, 1.0, True, floor="floor-dp2"
    ),
    Pair("torchtitan-tp2", "torchtitan-tp2", "holdfast-tp2", AHEAD, 1.0, True, floor="floor-tp2"),
    Pair(
        "torchtitan-pp2",
        "torchtitan-pp2",
        "holdfast-pp2",
        AHEAD,
        1.0,
        True,
        microbatches=8,
        floor="floor-pp2",
    ),
    Pair("torchtitan-fsdp", "torchtitan", "holdfast-zero3", AHEAD, 1.0, True, floor="floor-dp2"),
)

if __name__ == "__main__":
    sys.exit(compare(PAIRS, __doc__.splitlines()[0]))
