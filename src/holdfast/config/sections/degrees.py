"""Rules for degrees that work together, to the extent that the run file alone decides it.

A violated rule gives one sentence. It names the key, its value, and what the value does not fit.
It also names the nearest values below and above that every rule of the same axis allows. Rules
that depend on how microbatches are dealt are in `plan/placing/layouts.py`.

`train.precision: fp8` has rules, too. The kernels take factors whose inner length and number of
outputs are multiples of 16. The gradient of a weight is a product over the tokens of a microbatch.
Whether the device has such kernels is in `launch/node/devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, lcm

from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import REPLICAS, OptimizerConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.sections.train import TrainConfig
from holdfast.errors import nearest_degrees
from holdfast.layout import AXES
from holdfast.options.protocols import Checked
from holdfast.options.registry import option_keys


@dataclass(frozen=True)
class ModuleCuts:
    """How a module that is not the decoder itself may be cut."""

    trained: str  # the subject of a sentence
    parts: Mapping[str, int]  # name of each parameter that tp cuts -> its parts in one piece
    is_known: bool  # False before the task was asked
    can_have_table: bool  # a task may
    of_decoder: bool = False  # adapters of the decoder, cut as its layers are
    blocks: int = 0  # that a pipeline may share out; 0: a task names none


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
    return next(filter(None, _refusals(layout, model, train, length, cuts)), None)


def _refusals(
    layout: LayoutConfig,
    model: ModelConfig,
    train: TrainConfig,
    length: int,
    cuts: ModuleCuts | None,
) -> Iterator[str]:
    """The sentences of all violated rules, in the order of the checks; "" counts for none."""
    # Check that keys of the layout do not contradict each other.
    given = [axis for axis in AXES if getattr(layout, axis) > 1]
    given += ["stages"] if layout.stages else []
    if layout.replicas and given:
        yield (
            f"layout.{given[0]} is given beside layout.replicas, which have degrees of their own: "
            "use one of the two"
        )
    if layout.virtual_stages and layout.schedule != "interleaved":
        yield (
            f"layout.virtual_stages {layout.virtual_stages} has no effect on layout.schedule "
            f"{layout.schedule}: use layout.schedule interleaved, or virtual_stages 0"
        )
    run = Checked(layout, model, train, cuts)
    if run.has_decoder:
        yield from _balance_costs(layout, "model.layers", model.layers)
    elif cuts is not None and cuts.blocks:
        yield from _balance_costs(layout, "task.blocks", cuts.blocks)
    for option in option_keys():
        yield option.refuse(run)
    yield from _experts(layout, model, train, cuts)
    shards = lcm(*(degrees.dp_shard for _, degrees in layout.kinds))
    for key, degrees in layout.kinds:
        yield from _shard(key, degrees.dp_shard, shards, train)
        for option in option_keys():
            yield option.refuse_replica(run, key, degrees)
        if run.has_decoder:
            yield from _context(key, degrees, layout, model, length)
            yield from _pipeline(key, degrees, layout, "model.layers", model.layers)
            yield from _split_backward(key, degrees, layout, train)
        elif cuts is not None:
            yield from _module(key, degrees, layout, cuts, train)
        yield from _optimizer(key, degrees, layout.ep, train.optimizer)
        yield from _recompute(key, layout, train)
    if layout.workers:
        # Check that the workers fill complete replicas.
        workers, ranks = layout.workers, layout.least_workers
        if layout.replicas and workers != ranks:
            yield (
                f"layout.workers {workers} is not the {ranks} workers of layout.replicas together: "
                f"use {ranks}, or 0"
            )
        elif workers % ranks:
            axes = [axis for axis in AXES if getattr(layout, axis) > 1]
            named = " x ".join(f"layout.{axis} {getattr(layout, axis)}" for axis in axes)
            product = f" = {ranks}" if len(axes) > 1 else ""
            near = nearest_degrees(workers, lambda n: n % ranks == 0, workers + ranks)
            yield f"layout.workers {workers} is not a multiple of {named}{product}: use {near}"


def _balance_costs(layout: LayoutConfig, counted: str, layers: int) -> Iterator[str]:
    """Check that measured times are of all parts of the model, and are asked for."""
    costs, key = layout.balance_costs, "layout.balance_costs"
    if costs and layout.balance != "time":
        yield (
            f"{key} has times, which have no effect on layout.balance {layout.balance}: use "
            f"layout.balance time, or {key} []"
        )
    if costs and len(costs) != layers + 2:
        yield (
            f"{key} has {len(costs)} times, but an embedding, {layers} blocks ({counted}) and a "
            f"head are {layers + 2}: use {layers + 2} times, or {key} []"
        )


def _shard(key: str, degree: int, shards: int, train: TrainConfig) -> Iterator[str]:
    """Check that dp_shard splits the samples of a microbatch evenly.

    `shards`: the least common multiple of every replica's dp_shard. A larger microbatch is
    offered only if all of them and every size of batch allow it.
    """
    size = train.microbatch_size
    if size % degree == 0:
        return
    batch = gcd(train.batch_size, *(stage.batch_size for stage in train.batch_warmup))
    multiples = range(-(-size // shards) * shards, batch + 1, shards)
    larger = next((multiple for multiple in multiples if batch % multiple == 0), None)
    near = nearest_degrees(degree, lambda d: size % d == 0, size)
    yield (
        f"{key}.dp_shard {degree} does not divide train.microbatch_size {size}: use "
        + (f"train.microbatch_size {larger}, or " if larger is not None else "")
        + f"{key}.dp_shard {near}"
    )


def _experts(
    layout: LayoutConfig, model: ModelConfig, train: TrainConfig, cuts: ModuleCuts | None
) -> Iterator[str]:
    """Check that ep spreads experts evenly over the workers of every replica that share tokens."""
    ep, experts = layout.ep, model.experts
    if experts is not None and experts.capacity:
        for key in (key for key, degrees in layout.kinds if degrees.cp > 1):
            yield (
                f"model.experts.capacity {experts.capacity} drops the last tokens, and {key}.cp "
                "changes their order: use model.experts.capacity 0"
            )
    if ep == 1:
        return
    if experts is None or cuts is not None:
        yield f"layout.ep {ep} needs experts, and there is no model.experts: use layout.ep 1"
        return
    if layout.zero == 1:
        yield f"layout.ep {ep} does not work with layout.zero 1: use layout.zero 2"
    if "selective" in train.recompute_words:
        words = ", ".join(train.recompute_words).replace("selective", "full")
        yield (
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
            yield f"layout.ep {ep} does not divide {key}.{workers}: use layout.ep {near}"
    if experts.count % ep:
        yield (
            f"layout.ep {ep} does not divide model.experts.count {experts.count}: use layout.ep "
            f"{near}"
        )


def _context(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, model: ModelConfig, length: int
) -> Iterator[str]:
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
        return
    near = nearest_degrees(cp, works, max(1, length // 2))
    if length % (2 * cp):
        yield (
            f"{key}.cp {cp} does not cut data.sequence_length {length} into {2 * cp} equal chunks: "
            f"use {near}"
        )
    elif ring and cp % ring:
        yield f"{key}.cp {cp} is no multiple of layout.cp_ring {ring}: use {near}"
    else:
        swaps = f"{cp // ring} workers that swap heads, which do"
        yield (
            f"{key}.cp {cp} with layout.cp_method {method} has {swaps} not divide the {heads} "
            f"key/value heads of a worker: use {near}, or layout.cp_method ring"
        )


def _pipeline(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, counted: str, layers: int
) -> Iterator[str]:
    """Check that every stage holds at least one block, and named stages hold all blocks. counted:
    the key that has their number."""
    pp, stages = degrees.pp, list(degrees.stages)
    number = pp * layout.stages_a_worker if pp > 1 else 1
    if pp > layers:
        yield f"{key}.pp {pp} is more than {counted} {layers}: use {layers} or less"
    if number > layers:
        fewer = layers // layout.stages_a_worker
        near = (f"{key}.pp {fewer}, or " if fewer > 1 else "") + "layout.schedule 1f1b"
        yield (
            f"{key}.pp {pp} under layout.schedule {layout.schedule} has {number} stages, but "
            f"{counted} is {layers}: use "
            + (f"layout.virtual_stages {layers // pp}" if layout.virtual_stages else near)
        )
    even = [layers // number + (stage < layers % number) for stage in range(number)]
    instead = f"use {even}, or [] to have them balanced by cost"
    if stages and len(stages) != number:
        stages_of = f"{key}.pp {pp}" + (f" x {number // pp}" if number > pp else "")
        yield f"{key}.stages {stages} has {len(stages)} of {stages_of} stages: {instead}"
    if stages and sum(stages) != layers:
        yield (
            f"{key}.stages {stages} holds {sum(stages)} blocks, but {counted} is {layers}: "
            f"{instead}"
        )


def _split_backward(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, train: TrainConfig
) -> Iterator[str]:
    """Check what several stages a worker, or a backward in two halves, do not go with.

    FSDP2 (ZeRO 2 and 3) expects one forward and one backward of its root. Compiled blocks cannot
    leave a part of their backward for later.
    """
    name = layout.schedule
    is_split = SCHEDULE_KINDS[name].splits_backward
    if degrees.pp == 1 or not (is_split or layout.stages_a_worker > 1):
        return
    if degrees.dp_shard > 1 and layout.zero_in_memory > 1:
        yield (
            f"layout.schedule {name} does not work with layout.zero {layout.zero} and "
            f"{key}.dp_shard {degrees.dp_shard}: use {layout.complete_setting}, or layout.schedule "
            "1f1b"
        )
    if is_split and train.compile:
        yield (
            f"layout.schedule {name} does not work with train.compile: use train.compile false, or "
            "layout.schedule interleaved"
        )


def _module(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, cuts: ModuleCuts, train: TrainConfig
) -> Iterator[str]:
    """Check a module that is not the decoder. tp divides the parts of its table. It is one stage,
    and has all tokens of a sample."""
    tp, common = degrees.tp, gcd(*cuts.parts.values())
    if tp > 1 and cuts.is_known and not cuts.parts:
        write = "write sharding() in it, or " if cuts.can_have_table else ""
        yield (
            f"{key}.tp {tp} needs a sharding table, which says how each parameter is cut, and "
            f"{cuts.trained} has none: {write}use tp 1, with dp_shard or replicas"
        )
    if tp > 1 and cuts.is_known and train.compile:
        yield f"{key}.tp {tp} of a task does not work with train.compile: use train.compile false"
    for name, parts in cuts.parts.items() if cuts.is_known else ():
        if parts % tp:
            near = nearest_degrees(tp, lambda d: common % d == 0, common)
            yield f"{key}.tp {tp} does not divide the {parts} parts of {name}: use {near}"
    if degrees.pp > 1 and cuts.is_known:
        yield from _blocks(key, degrees, layout, cuts)
    if degrees.cp > 1:
        yield (
            f"{key}.cp {degrees.cp} cuts samples of the built-in decoder, and {cuts.trained} is "
            "trained: use cp 1, with dp_shard or replicas"
        )


def _blocks(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, cuts: ModuleCuts
) -> Iterator[str]:
    """Check that a task names blocks, and that its stages are one a worker."""
    if not cuts.blocks:
        write = ", or write a PipelineTask, which names them" if cuts.can_have_table else ""
        yield (
            f"{key}.pp {degrees.pp} shares out blocks, and {cuts.trained} names none: use pp 1, "
            f"with dp_shard or replicas{write}"
        )
        return
    if layout.schedule not in ("1f1b", "gpipe"):
        yield (
            f"layout.schedule {layout.schedule} is for the built-in decoder, and {cuts.trained} is "
            "trained: use layout.schedule 1f1b"
        )
    if degrees.tp > 1:
        yield (
            f"{key}.pp {degrees.pp} of a task does not work with {key}.tp {degrees.tp}: use pp 1, "
            "or tp 1"
        )
    yield from _pipeline(key, degrees, layout, "task.blocks", cuts.blocks)


def _optimizer(
    key: str, degrees: DegreesConfig, ep: int, optimizer: OptimizerConfig
) -> Iterator[str]:
    """Check that no axis cuts a parameter that the optimizer needs complete."""
    if optimizer.is_class and not optimizer.layouts:
        return  # not planned yet
    others = [axis for axis in optimizer.allowed_axes if axis != REPLICAS]
    works = " and ".join(("replicas (layout.workers)", *others))
    for axis in ("pp", "dp_shard", "tp"):
        if getattr(degrees, axis) > 1 and axis not in optimizer.allowed_axes:
            yield (
                f"{key}.{axis} {getattr(degrees, axis)} does not fit train.optimizer.name "
                f"{optimizer.name}, which needs complete parameters: use {axis} 1, with {works}"
            )
    if ep > 1 and "dp_shard" not in optimizer.allowed_axes:
        yield (
            f"layout.ep {ep} cuts experts, and train.optimizer.name {optimizer.name} needs "
            "complete parameters: use layout.ep 1"
        )


def _recompute(key: str, layout: LayoutConfig, train: TrainConfig) -> Iterator[str]:
    """Check that a list of words for recomputation has one for each stage."""
    words, kinds = train.recompute_words, dict(layout.kinds)
    pp = kinds[key].pp
    if isinstance(train.recompute, str) or len(words) == pp:
        return
    right = f"[{', '.join(train.recompute_of(stage, pp) for stage in range(pp))}]"
    if len({degrees.pp for degrees in kinds.values()}) > 1:
        right = train.recompute_of(0, 1)  # one word, which fits any pipeline
    yield (
        f"train.recompute [{', '.join(words)}] has {len(words)} words for {key}.pp {pp} stages: "
        f"use {right}"
    )


MULTIPLE = 16
"""Of each length of a float8 product."""


def find_impossible_float8(
    layout: LayoutConfig, model: ModelConfig, train: TrainConfig, length: int, trained: str
) -> str | None:
    """Return the sentence of the first violated rule, "... : use ..."; None if there is none.

    length: tokens of a sample. trained: the subject of a sentence if it is not the decoder.
    """
    if train.precision != "fp8":
        return None
    if trained:
        return (
            f"train.precision fp8 is for the built-in decoder, and {trained} has other layers: "
            "use train.precision bf16"
        )
    if model.experts is not None:
        return "train.precision fp8 has not been tried with model.experts: use train.precision bf16"
    refusals = (
        sentence
        for key, degrees in layout.kinds
        for sentence in _float8_refusals(key, degrees, layout.schedule, model, train, length)
    )
    return next(refusals, None)


def _float8_refusals(
    key: str,
    degrees: DegreesConfig,
    schedule: str,
    model: ModelConfig,
    train: TrainConfig,
    length: int,
) -> Iterator[str]:
    tp, head = degrees.tp, model.head_size
    lengths = {  # of the weights of a block, as tp cuts them
        f"model.dim {model.dim}": model.dim,
        f"model.heads {model.heads} x head_dim {head}": model.heads * head // tp,
        f"model.kv_heads {model.kv_heads} x head_dim {head}": max(1, model.kv_heads // tp) * head,
        f"model.ffn_dim {model.ffn_dim}": model.ffn_dim // tp,
    }
    for words, number in lengths.items():
        part = f" / {key}.tp {tp}" if tp > 1 and not words.startswith("model.dim") else ""
        if number % MULTIPLE:
            yield (
                f"train.precision fp8 needs lengths that are multiples of {MULTIPLE}, and "
                f"{words}{part} is none: use train.precision bf16"
            )
    part_length = length // degrees.cp
    tokens = train.microbatch_size // degrees.dp_shard * part_length  # 0: chosen later
    if tokens % MULTIPLE:
        samples = MULTIPLE // gcd(MULTIPLE, part_length) * degrees.dp_shard
        unit = MULTIPLE * degrees.cp
        yield (
            f"train.precision fp8 needs microbatches of a multiple of {MULTIPLE} tokens, and a "
            f"rank of {key} has {tokens}: use data.sequence_length {-(-length // unit) * unit}, or "
            f"train.microbatch_size {samples}"
        )
    if tp > 1 and model.attention_bias == "qkvo":
        yield (
            f"train.precision fp8 does not work with {key}.tp {tp} and model.attention_bias "
            "qkvo: use train.precision bf16, or tp 1"
        )
    if degrees.pp > 1 and SCHEDULE_KINDS[schedule].splits_backward:  # which torchao's cannot be
        yield (
            f"train.precision fp8 does not work with layout.schedule {schedule} and {key}.pp "
            f"{degrees.pp}: use layout.schedule 1f1b"
        )
