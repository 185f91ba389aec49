"""From one generation to the next in a live process: the state stays, what held it goes.

    kept = keep(engine, N)  leave the old groups; what remains is the state tensors of this rank
    (the caller drops the old engine: its model, hooks and gradient buffers)
    engine = adopt_engine(kept, config, topology, rank, store, device, came_from)

`adopt` is all three for a whole session, which is a worker's; the parts are for newcomers, and
for who drives an engine without data.

The new engine is built as for a start, and its state comes from the processes that have it, by
boxes: nothing is read from a checkpoint. Step, data position and random numbers are functions of
the step, so there is nothing else to carry over.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.config.run import RunConfig
from holdfast.errors import PeerLostError
from holdfast.layout import Topology
from holdfast.parallel.reshard import Held, move
from holdfast.parallel.torch_compat import Store
from holdfast.parallel.transport import exchange
from holdfast.spec.moves import transfers
from holdfast.spec.state import state_table
from holdfast.spec.tree import deal
from holdfast.train.build import Session, build_engine, meet, session_of
from holdfast.train.engine import Dealer, StepEngine

_TAG = 9  # of the exchange that closes a generation


@dataclass
class Kept:
    """What a process takes out of a generation: the state after `step`, and the topology that
    spread it so.

    A newcomer has no tensors, but is told topology and step, to know what it will be sent.
    """

    topology: Topology
    step: int
    tensors: dict[str, Held]


def keep(engine: StepEngine, step: int) -> Kept:
    """Leave the engine's generation with its state, which is that after `step`.

    The groups may be whole or broken. The engine must not be used afterwards; drop every
    reference to it before `adopt_engine`, or its memory and its groups' threads stay.
    """
    groups = engine.groups
    kept = Kept(groups.topology, step, {held.name: held for held in engine.state()})
    try:  # nobody may close a connection that a peer still reads from
        exchange(groups.control, torch.tensor([step]), [1] * groups.control.size, _TAG)
    except PeerLostError:
        groups.abort()  # nobody may wait for this process in a group that it leaves
    engine.close()
    return kept


def adopt_engine(
    kept: Kept, config: RunConfig, topology: Topology, rank: int, store: Store,
    device: torch.device, came_from: Sequence[int | None], *, dealer: Dealer = deal,
    seconds: float = 1800.0,
) -> StepEngine:  # fmt: skip
    """The engine of `rank` in `topology`, with the state that `kept` holds over all its ranks.

    Collective over `topology`. came_from: see `spec.moves.transfers`. `kept.tensors` is emptied.
    Raises LayoutError when part of the state is lost with the ranks that are gone, or when
    the layout cannot be run, and PeerLostError when a peer does not come or goes.
    """
    table = state_table(config.model, config.train.precision)
    moves = transfers(kept.topology, topology, table, came_from, rank)
    gc.collect()  # modules and their hooks refer to each other; the new ones need their room
    groups = meet(config, topology, rank, store, device, seconds)
    try:
        engine = build_engine(config, groups, device, dealer=dealer)
        positions = [groups.positions.index(rank) for rank in range(topology.world_size)]
        move(kept.tensors, engine.state(), moves, groups.control, positions, step=kept.step)
    except BaseException:
        groups.close()
        raise
    engine.parameters.refresh()
    return engine


def adopt(
    session: Session, topology: Topology, rank: int, store: Store,
    came_from: Sequence[int | None], *, step: int, dealer: Dealer = deal, seconds: float = 1800.0,
) -> Session:  # fmt: skip
    """The session of `rank` in `topology`, with the state after `step` that `session` holds.

    Collective over `topology`; close the loader first. Nothing of the old session may be used
    afterwards: it is emptied here, because what its callers still refer to is not freed. Raises as
    `adopt_engine`; the state is lost to this process then.
    """
    config, device, batches = session.config, session.device, session.batches
    kept = keep(session.engine, step)
    del session.engine, session.evaluator, session.groups
    engine = adopt_engine(
        kept, config, topology, rank, store, device, came_from, dealer=dealer, seconds=seconds
    )
    return session_of(config, engine, batches, device)
