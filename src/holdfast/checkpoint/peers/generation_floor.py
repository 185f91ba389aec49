"""The generation above which a run begins if its folder knows of none.

A new folder may be that of a new run, or of a run whose folder was lost. In the second case its
peers hold snapshots and the bucket has checkpoints, under the generations that the lost folder
counted. If the run began with generation 1 again, all peers that know a newer one would fence it,
and it would not find their snapshots. So they are asked for their newest generation, and the
folder's first generation is the next. Opening it fences every node still at work under an older
one. Its snapshots and checkpoints are found as after any other restart.

Peers answer only a holder of the run's secret. The secret must have survived, so it is kept outside
of the folder (`HOLDFAST_SECRET_FILE`). A folder with a new secret can prove nothing. A peer that
refuses it is told apart from one that is away.

If the user asks for a beginning, all snapshots of other machines are given up. Before our
generation, one that began from step 0 is noted above all of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.source import INVENTORY_TIMEOUT_S
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.start_records import newest_started_generation, record_start
from holdfast.core.format.manifest import parse_commit_key
from holdfast.errors import START_OVER, HoldfastError, RunFolderError
from holdfast.wire.http.auth import AuthError
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_generation


def generation_floor(
    store: RunStore,
    peers: Sequence[Peer],
    secret: Secret,
    run_id: str,
    is_fresh: bool,
    say: Callable[[str], None],
) -> int:
    """Return the newest generation of the run that a peer, or a note or checkpoint in the folder,
    names. Return 0 if the folder has opened a generation, or if none is named.

    `run_id`: what is computed (`peers.client.run_identity`); `is_fresh`: this is to be a beginning.
    Raises RunFolderError if a peer does not accept the run's secret, unless `is_fresh`.
    """
    if newest_generation(store) > 0:
        return 0
    commits = [position[1] for key in list_commits(store) if (position := parse_commit_key(key))]
    newest = max([newest_started_generation(store), *commits])
    for peer, answer in _ask_peers(peers, secret, run_id):
        if isinstance(answer, int):
            if answer and not is_fresh:
                say(
                    f"{peer.name} knows this run up to generation {answer}: the run folder is new, "
                    f"and goes on from what there is"
                )
            newest = max(newest, answer)
        elif isinstance(answer, AuthError):
            if not is_fresh:
                raise RunFolderError(
                    f"{peer.address} does not accept the secret of this run folder, which is new",
                    where=f"checkpoint.peers, {peer.name}",
                    remedy=f"give both the same secret file (here: {SECRET_FILE_VARIABLE}); "
                    f"if the run folder was lost, that of the lost run; or {START_OVER}",
                )
        elif not is_fresh:
            say(f"{peer.name} cannot say what it holds of this run, whose folder is new: {answer}")
    if is_fresh and newest:
        newest += 1
        record_start(store, newest, 0)
    return newest


def _ask_peers(
    peers: Sequence[Peer], secret: Secret, run_id: str
) -> list[tuple[Peer, int | HoldfastError]]:
    """Return each peer's answer; all are asked in parallel."""

    def ask(peer: Peer) -> int | HoldfastError:
        try:
            client = PeerClient(
                peer.address, secret, 0, run_id, silence_timeout_s=INVENTORY_TIMEOUT_S
            )
            try:
                return client.newest_generation()
            finally:
                client.close()
        except HoldfastError as error:
            return error
        except (KeyError, TypeError, ValueError) as error:
            return HoldfastError(f"{peer.address} says what makes no sense ({error})")

    if not peers:
        return []
    with ThreadPoolExecutor(len(peers), "ask") as threads:
        return list(zip(peers, threads.map(ask, peers), strict=True))
