"""`holdfast actor`: generate completions for a run that is at work elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.errors import ConfigError, UserError
from holdfast.launch.node.node_name import default_node_name
from holdfast.launch.run.bucket_run import require_secret
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.regions import refuse_visitor_elsewhere
from holdfast.machine.hardware import detect_hardware
from holdfast.machine.limits import usable_cores
from holdfast.rollout.roles.devices import actor_devices
from holdfast.rollout.roles.spec import HOST_MODULE, HostSpec
from holdfast.show.output import say
from holdfast.wire import lifeline
from holdfast.wire.child_command import module_command
from holdfast.wire.secret import open_secret
from holdfast.wire.term import newest_term, secret_of

app = make_app("Generate completions for a run that is at work elsewhere.")


@app.command()
def actor(
    run: RunArgument,
    actors: Annotated[int, typer.Option(help="processes that generate here")] = 1,
    scorers: Annotated[int, typer.Option(help="processes that rate completions here")] = 0,
    device: Annotated[str, typer.Option(help="where they compute: cpu, cuda, cuda:1")] = "",
) -> int:
    """Help a run with rollout from a machine that is no node of it.

    It needs the run folder (or its bucket) and the secret, and reaches the agents of the run. It
    may come and leave at any time: what it has not handed in is generated elsewhere, with the same
    bits. It ends with Ctrl-C, or a minute after the run has.

    \b
    Example:
      holdfast actor runs/reinforce --actors 2
    """
    found = open_run(run)
    if not found.config.rollout.is_on:
        raise ConfigError(
            f"the run {found.config.name} generates nothing",
            where="rollout.prompts",
            remedy="name a run with a section rollout",
        )
    if actors < 0 or scorers < 0 or not actors + scorers:
        raise UserError(
            f"{actors} actors and {scorers} scorers do nothing",
            where="--actors",
            remedy="use --actors 1 or more",
        )
    refuse_visitor_elsewhere(found.config.governance, os.environ)
    require_secret(found.folder)
    _, holder = newest_term(found.store)
    secret = secret_of(holder or {}, open_secret(found.folder, say=say))
    config = found.config
    if device:
        config = config.model_copy(update={"device": device.partition(":")[0]})
    hardware = detect_hardware()
    devices = (device,) if ":" in device else actor_devices(config, len(hardware.accelerators))
    name = f"{default_node_name(os.environ)} (visitor {os.getpid()})"
    spec = HostSpec(
        config=config.model_dump(mode="json"),
        secret=secret.hex(),
        agent="",
        run_folder=str(found.folder),
        node=name,
        policies="",
        actors=actors,
        scorers=scorers,
        devices=devices,
        threads=max(1, usable_cores() // (actors + scorers)),
    )
    say(f"{actors} actors and {scorers} scorers help {config.name}; Ctrl-C ends them")
    return _run_host(spec)


def _run_host(spec: HostSpec) -> int:
    read_end, write_end = lifeline.open_lifeline()
    process = subprocess.Popen(
        module_command(HOST_MODULE, "--lifeline", str(read_end)),
        stdin=subprocess.PIPE,
        pass_fds=(read_end,),
        start_new_session=True,
    )
    assert process.stdin is not None
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        process.stdin.write(json.dumps(spec.to_json()).encode() + b"\n")
        process.stdin.flush()
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
        os.close(write_end)  # ends the host and its children
        process.kill()
        process.wait()


def _end(*_: object) -> None:
    """End as after Ctrl-C."""
    raise KeyboardInterrupt
