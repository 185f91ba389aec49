"""Faults of checkpoints that are encrypted, and perhaps compressed, before they leave.

Files in the folder are damaged, and the restore goes through the seal. A checkpoint is intact if
its raw files are as they were written. Only the driver knows the use of each byte of an encrypted
file. So a checkpoint that is older or newer than the newest intact one is judged by its tensors.
"""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.core.format.manifest import parse_commit_key, parse_save_key
from holdfast.wire.store.encrypted_store import EncryptedStore
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoint_faults import rest, states
from tests.support.checkpoint_faults.histories import Files, contents, history
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.verdict import Restored, WrongError, restore, restore_verified

NO_FILE = ("zeros", "swap-extents", "strange-files", "folder-instead", "none-left")
"""Damage that needs the layout of a plain file, or that changes none."""
DAMAGE = [name for name in rest.DAMAGE if name not in NO_FILE]


def at_rest(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    made = history(setting.first, setting.second)
    key, compress = rng.randbytes(32), rng.random() < 0.5
    folder.mkdir()
    store = EncryptedStore(FolderStore(folder), key, compress=compress, extent_bytes=512)
    for name, data in made.files.items():
        store.create(name, data)
    written = contents(folder)
    victim = rest.Victim(folder, made)
    names = rng.sample(DAMAGE, rng.choice([1, 1, 2]))
    what = "; ".join(rest.DAMAGE[name][0](victim, rng) for name in names)
    if rng.random() < 0.1:
        what, key = f"{what}; another key", rng.randbytes(32)
    again = EncryptedStore(FolderStore(folder), key, compress=compress, extent_bytes=512)
    whole = _newest_whole(contents(folder), written) if "another key" not in what else (0, 0)
    topo = states.topology(rng.randrange(8), 5)
    for how in (restore_verified, restore):
        found = how(again, topo)
        if found.position is None and (whole > (0, 0) or not found.sentence):
            raise WrongError(f"{what}: {found} ({found.sentence}), {whole} is whole")
        if found.position is not None and found.position < whole:
            raise WrongError(f"{what}: {found}, though {whole} is whole")
    return what, found


def _newest_whole(found: Files, written: Files) -> tuple[int, int]:
    """(step, generation) of the newest checkpoint none of whose files has changed."""
    best = (0, 0)
    for key in written:
        position = parse_commit_key(key)
        if position is None:
            continue
        files = [key, *(k for k in written if parse_save_key(k) == position)]
        if all(found.get(k) == written[k] for k in files):
            best = max(best, position)
    return best
