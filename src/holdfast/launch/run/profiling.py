"""Asks a running job for a profile of its next steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.elastic.protocol.generation_record import record_of
from holdfast.elastic.protocol.profile_messages import PROFILE_PATH, ProfileReply, ProfileRequest
from holdfast.errors import ConfigError, HoldfastError, RunFolderError
from holdfast.events import RunFailed, RunFinished, RunStopped, StepsProfiled
from holdfast.launch.run.node_checks import agent_addresses
from holdfast.launch.run.runs import Run
from holdfast.wire.http.client import NO_GENERATION, Client
from holdfast.wire.journal import JournalTail
from holdfast.wire.secret import open_secret
from holdfast.wire.store.run_store import append_interval
from holdfast.wire.term import newest_generation, newest_term, secret_of

_POLL_S = 0.5
_ENDS = (RunFinished, RunStopped, RunFailed)


def profile_run(
    run: Run, steps: int, ranks: Sequence[int], timeout_s: float
) -> list[StepsProfiled]:
    """Have the next steps of a run at work profiled; return what each rank wrote.

    Raises:
        ConfigError: The run has no such rank.
        RunFolderError: No agent of such a rank answers, the run ends first, or it takes longer than
            `timeout_s` seconds.
    """
    _, holder = newest_term(run.store)
    secret = secret_of(holder, open_secret(run.folder))
    generation = newest_generation(run.store)
    record = record_of(run.store, generation) if generation else None
    world = 0 if record is None or record.topology is None else record.topology.world_size
    if missing := [rank for rank in ranks if rank >= world]:
        raise ConfigError(
            f"there is no rank {missing[0]} in a run of {world} workers",
            where="--rank",
            remedy=f"use a rank from 0 to {max(0, world - 1)}",
        )
    tail = JournalTail(run.store)
    tail.read_new()
    request = ProfileRequest(time.time_ns() // 1_000_000, steps, tuple(ranks))
    asked, problem = set[int](), ""
    for address in agent_addresses(record, holder).values():
        client = Client(address, secret, NO_GENERATION, connect_retry_s=0.0)
        try:
            asked |= set(ProfileReply.from_json(client.post(PROFILE_PATH, request.to_json())).ranks)
        except HoldfastError as error:
            problem = f": {error}"
        finally:
            client.close()
    if silent := set(ranks) - asked:
        raise _refusal(run, f"no agent of rank {min(silent)} answers{problem}")
    found: dict[int, StepsProfiled] = {}
    end = time.monotonic() + timeout_s
    while len(found) < len(asked):
        is_over = False
        for event in (one.event for one in tail.read_new()):
            if isinstance(event, StepsProfiled) and event.request == request.number:
                found[event.rank] = event
            is_over = is_over or isinstance(event, _ENDS)
        if len(found) == len(asked):
            break
        if is_over or time.monotonic() > end:
            why = "the run ended" if is_over else f"{timeout_s:g} s were over"
            raise _refusal(run, f"{why} before rank {min(asked - found.keys())} wrote its profile")
        time.sleep(max(_POLL_S, append_interval(run.store)))
    return [found[rank] for rank in sorted(found)]


def _refusal(run: Run, problem: str) -> RunFolderError:
    return RunFolderError(
        problem, where=run.place, remedy="call this while the run is at work: holdfast status RUN"
    )
