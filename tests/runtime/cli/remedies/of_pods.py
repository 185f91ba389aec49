"""Remedies of messages about a controller of gangs and its hosts."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_platform.commands.host import host
from holdfast_platform.pods.controller import Controller
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed

OTHER = "0123456789abcdef" * 4


def submit(lab: Lab) -> None:
    with Controller(secret_file=lab.path("secret")) as controller:
        controller.submit(["true"], on=lab.settings["on"])


def take_part(lab: Lab) -> None:
    """A host of a controller that ends once the host is there."""
    with Controller(secret_file=lab.path("secret")) as controller:
        stop = threading.Event()

        def end() -> None:
            while not controller.hosts() and not stop.wait(0.01):
                pass
            controller.close()

        thread = threading.Thread(target=end)
        thread.start()
        try:
            named = lab.settings.get("secret")
            address = lab.settings.get("address") or controller.address
            host(address, "big", "one", None if named is None else Path(named))
        finally:
            stop.set()
            thread.join()


def begin_other_secret(lab: Lab) -> None:
    other = lab.write("other", OTHER)
    other.chmod(0o600)
    lab.settings["secret"] = other


def use_the_secret(lab: Lab, found: object) -> None:
    lab.settings["secret"] = lab.path("secret")


CASES: list[Case] = [
    case(
        "holdfast_platform/pods/controller.py: (_submit)",
        lambda lab: lab.settings.update(on={}),
        submit,
        r"give on=\{GROUP: HOSTS\} with 1 or more hosts",
        fixed(on={"group": 1}),
    ),
    case(
        "holdfast_platform/commands/host.py: the controller's secret is not known",
        lambda lab: None,
        take_part,
        r"name its file here, or in HOLDFAST_SECRET_FILE",
        use_the_secret,
    ),
    case(
        "holdfast_platform/commands/host.py: … is no address",
        lambda lab: lab.settings.update(secret=lab.path("secret"), address="here"),
        take_part,
        r"use HOST:PORT of the controller",
        fixed(address=""),
    ),
    case(
        "holdfast_platform/pods/host.py: the controller cannot be asked (…)",
        begin_other_secret,
        take_part,
        r"start this host again when the controller is there, with its secret",
        use_the_secret,
    ),
]
