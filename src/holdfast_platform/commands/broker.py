"""`holdfast broker`: an Open Service Broker that launches runs for a platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.show.output import print_line, say

app = make_app("Launch runs for a platform that speaks the Open Service Broker API.")


@app.command()
def broker(
    runs: Annotated[Path, typer.Option(help="folder of the instances and their run files")],
    secret: Annotated[Path, typer.Option(help="file with the password (64 hexadecimal digits)")],
    interface: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print the address as JSON")] = False,
) -> int:
    """Serve the Open Service Broker API 2.17 until Ctrl-C; an instance is a launched run.

    The platform logs in as the user 'holdfast' with the password of the file. HTTP is not
    encrypted. For other machines, set a proxy with TLS in front of it (docs/guide/broker.md).

    \b
    Example:
      openssl rand -hex 32 > broker.secret; chmod 600 broker.secret
      holdfast broker --runs instances --secret broker.secret --port 8090
    """
    from holdfast.config.sections.peers import is_loopback
    from holdfast.errors import UserError
    from holdfast.wire.http.asgi import require_web_packages, serve_asgi
    from holdfast.wire.http.sockets import address_of, bind_listener
    from holdfast.wire.secret import read_secret

    require_web_packages("holdfast broker", "broker")
    if runs.exists() and not runs.is_dir():
        raise UserError("this is no folder", where=str(runs), remedy="name another with --runs")
    from holdfast_platform.broker.app import make_app as make_web_app
    from holdfast_platform.broker.instances import Instances

    password = read_secret(secret, is_given=True, say=say).key.hex()
    instances = Instances(runs)
    bound = bind_listener(interface, port, "--interface")
    if not is_loopback(interface):
        say("the password is not encrypted on its way: use this address behind a proxy with TLS")
    instances.resume()
    if json:
        print_line({"address": address_of(bound)})
    else:
        say(f"listening at http://{address_of(bound)}; Ctrl-C ends the broker, and no run")
    serve_asgi(make_web_app(instances, password), bound)
    return 0
