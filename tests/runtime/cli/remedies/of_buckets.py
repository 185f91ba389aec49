"""Remedies of messages about a run in a bucket. A proxy stands before the bucket."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from re import Match

from holdfast.cli.checkpoint_import import require_folder
from holdfast.config.loading.load import load_config
from holdfast.launch.run.bucket_run import (
    refuse_foreign_bucket,
    refuse_fresh_in_bucket,
    require_secret,
)
from holdfast.wire.secret import SECRET_FILE_VARIABLE
from holdfast.wire.store.run_location import STORE_FILE, make_local_folder, store_of_run
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.runtime.cli.remedies.of_stores import environment, faulty, probe
from tests.support import s3

L, E = "launch/run/bucket_run.py: ", "wire/store/bucket_errors.py: "


def begin(lab: Lab) -> None:
    """A run in a bucket, with a cache folder of this test."""
    variables = s3.CREDENTIALS | {"XDG_CACHE_HOME": lab.path("cache")}
    lab.settings.update(address=s3.location(s3.server()), environment=variables)


def at_local_folder(check: Callable[[Path], object]) -> Callable[[Lab], None]:
    def attempt(lab: Lab) -> None:
        with environment(lab):
            address = lab.settings["address"]
            check(make_local_folder(address) if "://" in address else Path(address))

    return attempt


def use_other_place(lab: Lab, found: Match[str]) -> None:
    lab.settings["address"] = s3.location(s3.server())


def use_folder(lab: Lab, found: Match[str]) -> None:
    lab.settings["address"] = lab.path("run")


def fresh(folder: Path) -> None:
    """As `train --fresh`, which asks only where a run is."""
    if store_of_run(folder).list("terms/"):
        refuse_fresh_in_bucket(folder)


def begin_with_checkpoint(lab: Lab) -> None:
    begin(lab)
    with environment(lab):
        folder = make_local_folder(lab.settings["address"])
        store_of_run(folder).create("terms/0000000001.json", b"{}")


def copy_secret(lab: Lab, found: Match[str]) -> None:
    """From the node that began the run."""
    other = lab.write("secret-there", "5e" * 32)
    other.chmod(0o600)
    with environment(lab):
        shutil.copy2(other, make_local_folder(lab.settings["address"]) / "secret")


def begin_bad_marker(lab: Lab) -> None:
    begin(lab)
    with environment(lab):
        (make_local_folder(lab.settings["address"]) / STORE_FILE).write_text("[]")


def remove_marker(lab: Lab, found: Match[str]) -> None:
    next(Path(lab.path("cache")).glob(f"holdfast/runs/*/{STORE_FILE}")).unlink()


def import_there(lab: Lab) -> None:
    with environment(lab):
        require_folder(load_config(None, [f"folder={lab.settings['address']}"]))


def name_region(lab: Lab, found: Match[str]) -> None:
    lab.settings["location"] += "&region=eu-1"
    lab.settings["proxy"].rule = lambda request: None  # it is the region of this bucket


CASES: list[Case] = [
    case(
        L + "--fresh moves an old run aside, and objects of a bucket cannot be renamed",
        begin_with_checkpoint,
        at_local_folder(fresh),
        r"begin under another prefix with folder=\.\.\., or remove the objects",
        use_other_place,
    ),
    case(
        L + "there are checkpoints under this prefix, and no description of a run",
        begin_with_checkpoint,
        at_local_folder(refuse_foreign_bucket),
        r"name another prefix with folder=\.\.\., or this one in checkpoint\.bucket",
        use_other_place,
    ),
    case(
        L + "this node does not have the run's secret, which no bucket holds",
        begin,
        at_local_folder(require_secret),
        r"copy that file here from the node that began the run, with mode 0600, or name a copy in "
        + SECRET_FILE_VARIABLE,
        copy_secret,
    ),
    case(
        "wire/store/run_location.py: this file does not name a bucket",
        begin_bad_marker,
        at_local_folder(store_of_run),
        r"remove it; a command that gets the bucket's address writes it again",
        remove_marker,
    ),
    case(
        "cli/checkpoint_import.py: an import needs a run folder, and folder is the address of a "
        "bucket",
        begin,
        import_there,
        r"import into a folder with folder=<path>",
        use_folder,
    ),
    case(
        E + "the bucket is in another region, or behind another endpoint",
        faulty(301, "PermanentRedirect"),
        probe,
        r"name them with \?region=<its region> and \?endpoint=<its address>",
        name_region,
    ),
]
