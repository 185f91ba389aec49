"""Rules for degrees that work together, to the extent that the run file alone decides it.

A violated rule gives one sentence. It names the key, its value, and what the value does not fit.
It also names the nearest values below and above that every rule of the same axis allows. Rules
that depend on how microbatches are dealt are in `plan/placing/layouts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

from holdfast.config.nearest import nearest_degrees
from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import REPLICAS, OptimizerConfig
from holdfast.config.sections.pipeline import (
    check_balance_costs,
    check_pipeline,
    check_split_backward,
    check_virtual_stages,
)
from holdfast.config.sections.train import TrainConfig
from holdfast.layout import AXES
from holdfast.options.protocols import Checked
from holdfast.options.registry import option_keys


@dataclass(frozen=True)
class ModuleCuts:
    """How a module that is not the decoder may be cut.

    trained: the subject of a sentence. parts: name of each parameter that tp cuts -> its parts that
    stay in one piece. is_known: False before the task was asked. can_have_table: a task may.
    """

    trained: str
    parts: Mapping[str, int]
    is_known: bool
    can_have_table: bool


def find_impossible_degrees(
    layout: LayoutConfig,
    model: ModelConfig,
    train: TrainConfig,
    length: int,
    cuts: ModuleCuts | None = None,
) -> str | None:
    """Return the sentence of the first violated rule, "... : use ..."; None if there is none.
    length: of a sample. cuts: of what is trained if it is not the decoder
    (`RunConfig.module_cuts`)."""
    if sentence := _degrees_in_two_places(layout) or check_virtual_stages(layout):
        return sentence
    if sentence := check_balance_costs(layout, model.layers) if cuts is None else "":
        return sentence
    run = Checked(layout, model, train, cuts)
    for option in option_keys():
        if sentence := option.refuse(run):
            return sentence
    if sentence := _experts(layout, model, train, cuts):
        return sentence
    shards = lcm(*(degrees.dp_shard for _, degrees in layout.kinds))
    for key, degrees in layout.kinds:
        by_table = (
            [
                _context(key, degrees, layout, model, length),
                check_pipeline(key, degrees, layout, model.layers),
                check_split_backward(key, degrees, layout, train),
            ]
            if cuts is None
            else [
                _module_tensor(key, degrees.tp, cuts, train),
                _no_stages(key, degrees.pp, cuts),
                _no_context(key, degrees.cp, cuts),
            ]
        )
        by_table += [
            _optimizer(key, degrees, layout.ep, train.optimizer),
            _recompute(key, layout, train),
        ]
        options = [option.refuse_replica(run, key, degrees) for option in option_keys()]
        for sentence in (_shard(key, degrees.dp_shard, shards, train), *options, *by_table):
            if sentence:
                return sentence
    return _workers(layout) or None if layout.workers else None


def _degrees_in_two_places(layout: LayoutConfig) -> str:
    given = [axis for axis in AXES if getattr(layout, axis) > 1]
    given += ["stages"] if layout.stages else []
    if not layout.replicas or not given:
        return ""
    return (
        f"layout.{given[0]} is given beside layout.replicas, which have degrees of their own: "
        "use one of the two"
    )


def _shard(key: str, degree: int, shards: int, train: TrainConfig) -> str:
    """Check that dp_shard splits the samples of a microbatch evenly.

    `shards`: the least common multiple of every replica's dp_shard. A larger microbatch is
    offered only if all of them and every size of batch allow it.
    """
    size = train.microbatch_size
    if size % degree == 0:
        return ""
    batch = gcd(train.batch_size, *(stage.batch_size for stage in train.batch_warmup))
    multiples = range(-(-size // shards) * shards, batch + 1, shards)
    larger = next((multiple for multiple in multiples if batch % multiple == 0), None)
    near = nearest_degrees(degree, lambda d: size % d == 0, size)
    return (
        f"{key}.dp_shard {degree} does not divide train.microbatch_size {size}: use "
        + (f"train.microbatch_size {larger}, or " if larger is not None else "")
        + f"{key}.dp_shard {near}"
    )


def _experts(
    layout: LayoutConfig, model: ModelConfig, train: TrainConfig, cuts: ModuleCuts | None
) -> str:
    """Check that ep spreads experts evenly over the workers of every replica that share tokens."""
    ep, experts = layout.ep, model.experts
    if experts is not None and experts.capacity:
        key = next((key for key, degrees in layout.kinds if degrees.cp > 1), None)
        if key is not None:
            return (
                f"model.experts.capacity {experts.capacity} drops the last tokens, and {key}.cp "
                "changes their order: use model.experts.capacity 0"
            )
    if ep == 1:
        return ""
    if experts is None or cuts is not None:
        return f"layout.ep {ep} needs experts, and there is no model.experts: use layout.ep 1"
    if layout.zero == 1:
        return f"layout.ep {ep} does not work with layout.zero 1: use layout.zero 2"
    if "selective" in train.recompute_words:
        words = ", ".join(train.recompute_words).replace("selective", "full")
        return (
            f"layout.ep {ep} gathers parameters inside of blocks, which train.recompute selective "
            "does not run again: use train.recompute "
            + (words if isinstance(train.recompute, str) else f"[{words}]")
        )
    every = gcd(*(each.dp_shard * each.cp for _, each in layout.kinds))
    both = gcd(every, experts.count)
    near = nearest_degrees(ep, lambda d: both % d == 0, both)
    for key, degrees in layout.kinds:
        if degrees.dp_shard * degrees.cp % ep:
            axes = [
                f"{axis} {n}" for axis in ("dp_shard", "cp") if (n := getattr(degrees, axis)) > 1
            ]
            workers = " x ".join(axes or ["dp_shard 1"])
            return f"layout.ep {ep} does not divide {key}.{workers}: use layout.ep {near}"
    if experts.count % ep:
        return (
            f"layout.ep {ep} does not divide model.experts.count {experts.count}: use layout.ep "
            f"{near}"
        )
    return ""


def _context(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, model: ModelConfig, length: int
) -> str:
    """Check that cp cuts a sample into two equal chunks a worker, and a swap cuts no head."""
    cp, tp, method = degrees.cp, degrees.tp, layout.cp_method
    ring = {"ulysses": 1, "ulysses-ring": layout.cp_ring}.get(method, 0)  # 0: all
    parts = layout.tp_parts(tp)[0]
    heads = gcd(model.heads // parts or 1, max(1, model.kv_heads // parts))  # of a worker

    def works(d: int) -> bool:
        swaps = d // ring if ring else 1
        return d == 1 or (
            length % (2 * d) == 0 and d % max(ring, 1) == 0 and heads % max(swaps, 1) == 0
        )

    if works(cp):
        return ""
    near = nearest_degrees(cp, works, max(1, length // 2))
    if length % (2 * cp):
        return (
            f"{key}.cp {cp} does not cut data.sequence_length {length} into {2 * cp} equal chunks: "
            f"use {near}"
        )
    if ring and cp % ring:
        return f"{key}.cp {cp} is no multiple of layout.cp_ring {ring}: use {near}"
    swaps = f"{cp // ring} workers that swap heads, which do"
    return (
        f"{key}.cp {cp} with layout.cp_method {method} has {swaps} not divide the {heads} "
        f"key/value heads of a worker: use {near}, or layout.cp_method ring"
    )


def _no_context(key: str, cp: int, cuts: ModuleCuts) -> str:
    """Check that a module that is not the decoder has all tokens of a sample."""
    if cp == 1:
        return ""
    return (
        f"{key}.cp {cp} cuts samples of the built-in decoder, and {cuts.trained} is trained: use "
        "cp 1, with dp_shard or replicas"
    )


def _module_tensor(key: str, tp: int, cuts: ModuleCuts, train: TrainConfig) -> str:
    """Check that a module that is not the decoder has a table, whose parts tp divides."""
    if tp == 1 or not cuts.is_known:
        return ""
    if not cuts.parts:
        write = "write sharding() in it, or " if cuts.can_have_table else ""
        return (
            f"{key}.tp {tp} needs a sharding table, which says how each parameter is cut, and "
            f"{cuts.trained} has none: {write}use tp 1, with dp_shard or replicas"
        )
    if train.compile:
        return f"{key}.tp {tp} of a task does not work with train.compile: use train.compile false"
    name, parts = next(((n, p) for n, p in cuts.parts.items() if p % tp), ("", 0))
    if not name:
        return ""
    common = gcd(*cuts.parts.values())
    near = nearest_degrees(tp, lambda d: common % d == 0, common)
    return f"{key}.tp {tp} does not divide the {parts} parts of {name}: use {near}"


def _no_stages(key: str, pp: int, cuts: ModuleCuts) -> str:
    """Check that a module that is not the decoder is one stage."""
    if pp == 1:
        return ""
    return (
        f"{key}.pp {pp} needs a sharding table with stages, and {cuts.trained} has none: use pp 1, "
        "with dp_shard or replicas"
    )


def _optimizer(key: str, degrees: DegreesConfig, ep: int, optimizer: OptimizerConfig) -> str:
    """Check that no axis cuts a parameter that the optimizer needs complete."""
    if optimizer.is_class and not optimizer.layouts:
        return ""  # not planned yet
    axes = [axis for axis in ("pp", "dp_shard", "tp") if getattr(degrees, axis) > 1]
    axis = next((axis for axis in axes if axis not in optimizer.allowed_axes), None)
    if axis is None and ep > 1 and "dp_shard" not in optimizer.allowed_axes:
        return (
            f"layout.ep {ep} cuts experts, and train.optimizer.name {optimizer.name} needs "
            "complete parameters: use layout.ep 1"
        )
    if axis is None:
        return ""
    others = [axis for axis in optimizer.allowed_axes if axis != REPLICAS]
    works = " and ".join(("replicas (layout.workers)", *others))
    return (
        f"{key}.{axis} {getattr(degrees, axis)} does not fit train.optimizer.name "
        f"{optimizer.name}, which needs complete parameters: use {axis} 1, with {works}"
    )


def _recompute(key: str, layout: LayoutConfig, train: TrainConfig) -> str:
    """Check that a list of words for recomputation has one for each stage."""
    words, kinds = train.recompute_words, dict(layout.kinds)
    pp = kinds[key].pp
    if isinstance(train.recompute, str) or len(words) == pp:
        return ""
    right = f"[{', '.join(train.recompute_of(stage, pp) for stage in range(pp))}]"
    if len({degrees.pp for degrees in kinds.values()}) > 1:
        right = train.recompute_of(0, 1)  # one word, which fits any pipeline
    return (
        f"train.recompute [{', '.join(words)}] has {len(words)} words for {key}.pp {pp} stages: "
        f"use {right}"
    )


def _workers(layout: LayoutConfig) -> str:
    """Check that the workers fill complete replicas."""
    workers, ranks = layout.workers, layout.least_workers
    if layout.replicas:
        if workers == ranks:
            return ""
        return (
            f"layout.workers {workers} is not the {ranks} workers of layout.replicas together: "
            f"use {ranks}, or 0"
        )
    if workers % ranks == 0:
        return ""
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    named = " x ".join(f"layout.{axis} {getattr(layout, axis)}" for axis in axes)
    product = f" = {ranks}" if len(axes) > 1 else ""
    near = nearest_degrees(workers, lambda n: n % ranks == 0, workers + ranks)
    return f"layout.workers {workers} is not a multiple of {named}{product}: use {near}"
