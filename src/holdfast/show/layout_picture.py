"""The drawing of a Topology: grids, one row a rank, the dealing, and what a loss leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from holdfast.config.run import RunConfig
from holdfast.config.sections.recompute import RecomputePolicy
from holdfast.core.sharding.parameters import count_idle_parameters
from holdfast.core.sharding.parameters import count_parameters as parameters_of
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.state_table import MIXED
from holdfast.layout import AXES, Coordinate, Replica, Topology
from holdfast.plan.memory.activations import activations_of, device_kind, has_formula
from holdfast.plan.memory.memory_use import RankContents, Span
from holdfast.plan.placing.loss_impact import LossImpact
from holdfast.plan.step_microbatches import microbatches
from holdfast.report.formatting import format_bytes, format_count, format_plural
from holdfast.show.layout_estimate import (
    print_communicators,
    print_estimate,
    print_options,
    print_places,
    print_stages,
)
from holdfast.show.output import print_table

_BYTES = """\
bytes on a rank while a step's backward runs: parameters{copies}, the sum of
gradients, AdamW's two moments; on top come activations, messages on their way{gathered}"""


@dataclass(frozen=True)
class LayoutPicture:
    config: RunConfig
    topology: Topology
    holdings: Sequence[RankContents]
    lost: frozenset[int] = frozenset()
    loss: LossImpact | None = None

    def print(self) -> None:
        self._head()
        for replica in self.topology.replicas:
            print()
            self._grid(replica)
        print_stages(self.config, self.topology)
        print()
        self._ranks()
        print_options(self.config, self.topology, "ranks")
        self._activations()
        print_options(self.config, self.topology, "activations")
        print_places(self.config, self.topology)
        print()
        print_estimate(self.config, self.topology)
        print_options(self.config, self.topology, "estimate")
        print_communicators(self.config, self.topology)
        print()
        self._dealing()
        if self.loss is not None:
            print()
            self._what_if(self.loss)

    # --- the picture ----------------------------------------------------------------------
    def _head(self) -> None:
        model, layout = self.config.model, self.config.layout
        vocabulary = format_count(model.vocab_size) if model.vocab_size else "not known yet"
        print(
            f"{self.config.name}: {format_plural(model.layers, 'block')}, {model.heads} query and "
            f"{model.kv_heads} key/value heads, vocabulary {vocabulary}; "
            f"{format_count(parameters_of(model))} parameters{_active(self.config)}, "
            f"{self.config.train.precision}"
        )
        settings = [
            self._zero() if self._used("dp_shard") else "",
            ""
            if not self._used("tp")
            else f"sequence parallel {'on' if layout.sequence_parallel else 'off'}",
            f"context parallel by {layout.cp_method}" if self._used("cp") else "",
            f"schedule {layout.schedule}" if self._used("pp") else "",
            f"ep {layout.ep}, {_experts_a_rank(self.config)}" if layout.ep > 1 else "",
        ]
        said = "".join(f"; {setting}" for setting in settings if setting)
        print(
            f"{format_plural(self.topology.world_size, 'rank')} on "
            f"{format_plural(len(set(self.topology.nodes)), 'node')}, "
            f"{format_plural(len(self.topology.replicas), 'replica')}{said}"
        )

    def _zero(self) -> str:
        layout = self.config.layout
        when = f", gradients added up once a {layout.shards_add_each}" if layout.zero == 2 else ""
        return f"zero {layout.zero}{when}"

    def _used(self, axis: str) -> bool:
        return any(replica.degree(axis) > 1 for replica in self.topology.replicas)

    # --- a replica ------------------------------------------------------------------------
    def _grid(self, replica: Replica) -> None:
        """Rows are stages, columns the indices on every other axis."""
        degrees = [f"{axis} {replica.degree(axis)}" for axis in AXES if replica.degree(axis) > 1]
        stages = f", blocks {list(replica.stages)}" if replica.degree("pp") > 1 else ""
        shape = " x ".join(degrees) or "1 rank"
        print(f"replica {replica.index}: {shape}{stages}{self._fate(replica)}")
        axes = [axis for axis in AXES[1:] if replica.degree(axis) > 1]
        places = list(product(*(range(replica.degree(axis)) for axis in axes)))
        head = [" ".join(f"{a} {i}" for a, i in zip(axes, at, strict=True)) for at in places]
        rows = []
        for pp in range(replica.degree("pp")):
            ranks = [replica.rank_at(pp=pp, **dict(zip(axes, at, strict=True))) for at in places]
            rows.append([_describe_stages(replica, pp), *(self._cell(rank) for rank in ranks)])
        print_table(rows, ["", *head] if axes else ())

    def _fate(self, replica: Replica) -> str:
        if self.loss is None:
            return ""
        return " (broken)" if replica.index in self.loss.broken else " (whole)"

    def _cell(self, rank: int) -> str:
        mark = " LOST" if rank in self.lost else ""
        return f"{rank} on {self.topology.nodes[rank]}{mark}"

    # --- the ranks ------------------------------------------------------------------------
    def _activations(self) -> None:
        """The largest of all ranks, and how it comes about."""
        if not has_formula(self.config):
            return  # the estimate says so
        device = device_kind(self.config)
        found = [
            activations_of(self.config, self.topology, each.at, device) for each in self.holdings
        ]
        most = max(range(len(found)), key=lambda index: found[index].total)
        largest = found[most]
        print(
            f"activations kept for the backward, at most: {format_bytes(largest.total)} on rank "
            f"{self.holdings[most].rank} "
            f"({self._in_flight()} in flight {largest.in_flight}, each "
            f"{format_bytes(largest.per_microbatch)}); "
            f"train.recompute {self._policy(self.holdings[most].at)}"
        )

    def _in_flight(self) -> str:
        """What a rank keeps several of: of unlike stages an average is printed."""
        layout = self.config.layout
        is_plain = layout.stages_a_worker == 1 or not self._used("pp")
        return "microbatches" if is_plain else "stages of microbatches"

    def _policy(self, at: Coordinate) -> RecomputePolicy:
        replica = self.topology.replicas[at.replica]
        return self.config.recompute_policy(at.pp, replica.degree("pp"), replica.degree("tp"))

    def _ranks(self) -> None:
        used = [axis for axis in AXES if self._used(axis)]
        cut = ("heads", "kv heads", "vocabulary") if self._used("tp") else ()
        head = [
            "rank",
            "node",
            "replica",
            *used,
            "holds",
            *cut,
            "parameters",
            "gradients",
            "moments",
            "together",
        ]
        rows: list[list[object]] = []
        for each in self.holdings:
            vocabulary = each.vocabulary if each.embedding or each.head else (0, 0)
            spans = (each.heads, each.kv_heads, vocabulary) if cut else ()
            held = each.held
            blocks = [f"block{'s' if len(each.blocks) > 1 else ''} {_runs(each.blocks)}"]
            rows.append(
                [
                    each.rank,
                    each.node,
                    each.at.replica,
                    *(getattr(each.at, a) for a in used),
                    ", ".join(["embedding"] * each.embedding + blocks + ["norm, head"] * each.head),
                    *map(_span, spans),
                    *map(format_bytes, (held.parameters, held.gradients, held.moments, held.total)),
                ]
            )
        bare = [""] * (len(head) - 5)
        for name, pick in (("all", sum), ("largest", max)):
            figures = [
                pick(getattr(each.held, field) for each in self.holdings)
                for field in ("parameters", "gradients", "moments", "total")
            ]
            rows.append([name, *bare, *map(format_bytes, figures)])
        print_table(rows, head)
        precision = self.config.train.precision
        mixed = precision in MIXED
        zero, sharded = self.config.layout.zero_in_memory, self._used("dp_shard")
        print(
            _BYTES.format(
                copies=f" (fp32 and a {'fp16' if precision == 'fp16' else 'bf16'} copy)"
                if mixed and not (sharded and zero == 3)
                else "",
                gathered=",\nand what is gathered of the block at work"
                if sharded and zero > 1
                else ",\nand the optimizer's state of each learner (outer.learners)"
                if self.config.outer.is_on
                else "",
            )
        )

    # --- the dealing ----------------------------------------------------------------------
    def _dealing(self) -> None:
        """One row a replica, one column for each size of batch, and what a loss makes of it."""
        replicas = len(self.topology.replicas)
        head, columns = ["replica"], [list(map(str, range(replicas)))]
        for step, number in microbatches(self.config).items():
            since = f" from step {step} on" if step > 1 else ""
            work = f"microbatch{'es' if number > 1 else ''} a step"
            if self.config.outer.is_on:
                work = f"learner{'s' if number > 1 else ''} a round"
            head.append(f"{number} {work}{since}")
            columns.append(list(map(_share, deal(number, replicas))))
            if self.loss is not None and self.loss.whole:
                shares = dict(zip(self.loss.whole, deal(number, len(self.loss.whole)), strict=True))
                head.append("after the loss")
                columns.append([_share(shares.get(index, ())) for index in range(replicas)])
        print_table(list(zip(*columns, strict=True)), head)

    # --- a loss ---------------------------------------------------------------------------
    def _what_if(self, loss: LossImpact) -> None:
        lost = ", ".join(map(str, sorted(self.lost)))
        print(f"without {'rank' if len(self.lost) == 1 else 'ranks'} {lost}:")
        print(f"  broken      {_replicas(loss.broken)}{self._waiting(loss)}")
        dealt = ", to be dealt all microbatches" if loss.whole else ""
        print(f"  whole       {_replicas(loss.whole)}{dealt}")
        if loss.learners:
            lost = format_plural(loss.learners, "learner")
            print(f"  learners    the state of {lost} is lost: all begin from the newest snapshot")
        if loss.gone == 0:
            where = "in a whole replica" if loss.whole else "on the ranks that are left"
            print(f"  state       all {format_bytes(loss.of)} have a copy {where}")
        else:
            print(
                f"  state       {format_bytes(loss.gone)} of {format_bytes(loss.of)} have no "
                f"copy left outside "
                f"the lost ranks: {self._positions(loss.positions)}"
            )
            print("              those are in a checkpoint only")

    def _waiting(self, loss: LossImpact) -> str:
        if not loss.waiting:
            return ""
        alive = ", ".join(map(str, loss.waiting))
        return f"; alive in there, without work: {alive}"

    def _positions(self, positions: Sequence[int]) -> str:
        layers = self.config.model.layers
        blocks = [p for p in positions if 0 <= p < layers]
        words = ["embedding"] if -1 in positions else []
        words += [f"block{'s' if len(blocks) > 1 else ''} {_runs(blocks)}"] if blocks else []
        words += ["norm and head"] if layers in positions else []
        return ", ".join(words)


def _describe_stages(replica: Replica, pp: int) -> str:
    stages = replica.stages_at(pp)
    if replica.degree("pp") == 1:
        return "  "
    return f"  stage{'s' if len(stages) > 1 else ''} {_runs(stages or (pp,))}"


def _span(span: Span) -> str:
    first, number = span
    if number < 2:
        return str(first) if number else "none"
    return f"{first}-{first + number - 1}"


def _share(share: Sequence[int]) -> str:
    """A share in runs of neighbours, with its size."""
    return f"{_runs(share)} ({len(share)})" if share else "none"


def _runs(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(_span((run[0], len(run))) for run in runs)


def _replicas(indices: Sequence[int]) -> str:
    if not indices:
        return "no replica"
    return f"{'replica' if len(indices) == 1 else 'replicas'} {_runs(indices)}"


def _active(config: RunConfig) -> str:
    """How many parameters compute a token, if not all do."""
    idle = count_idle_parameters(config.model)
    return f" ({format_count(parameters_of(config.model) - idle)} a token)" if idle else ""


def _experts_a_rank(config: RunConfig) -> str:
    count = config.model.experts.count if config.model.experts else 0
    return f"{count // config.layout.ep} of {count} experts a rank"
