"""Remedies of messages about run stores, buckets, credentials, secrets, sockets and notices."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from re import Match
from typing import Any

import pytest

from holdfast.checkpoint.mover.socket_place import MoverSocket, secure_folder
from holdfast.config.run import RunConfig
from holdfast.elastic.agent.agent import check_node_name
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.launch.node.addresses import plan_addresses
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.secret import (
    SECRET_FILE_VARIABLE,
    SECRET_SOURCE_VARIABLE,
    given_secret_file,
    open_secret,
)
from holdfast.wire.secret_managers.request import SecretManagerError
from holdfast.wire.store.location import open_store, probe_store
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Lab
from tests.support import s3
from tests.support.s3 import Fault, Proxy

HEX = "5e" * 32
KEYS = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
OURS = tuple(f"AWS_{name}" for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "ACCESS_KEY_ID"))


@contextmanager
def environment(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in OURS:
            patch.delenv(name, raising=False)
        for name, value in lab.settings.get("environment", {}).items():
            patch.setenv(name, value)
        yield


# --- addresses of stores --------------------------------------------------------------------
def open_location(lab: Lab) -> None:
    with environment(lab):
        open_store(lab.settings["location"])


def at(location: str) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(location=location.format(root=lab.folder))


def write_option(lab: Lab, found: Match[str]) -> None:
    """Give the option the value that the remedy names."""
    name = found[1].partition("=")[0]
    lab.settings["location"] = re.sub(rf"{name}=[^&]*", found[1], lab.settings["location"])


def write_location(lab: Lab, found: Match[str]) -> None:
    lab.settings["location"] = found[1]


def credentials(lab: Lab, name: str, content: str, query: str, mode: int = 0o600) -> None:
    lab.write(name, content).chmod(mode)
    lab.settings["location"] = query.format(root=lab.folder)


def run_command(lab: Lab, found: Match[str]) -> None:
    subprocess.run(found[1], shell=True, check=True)


def with_file(content: str, query: str, mode: int = 0o600) -> Callable[[Lab], None]:
    return lambda lab: credentials(lab, "keys", content, query, mode)


def rewritten(content: str) -> Callable[[Lab, Match[str]], None]:
    return lambda lab, found: (lab.folder / "keys").write_text(content) and None


def name_key_file(lab: Lab, found: Match[str]) -> None:
    lab.write("keys", HEX).chmod(0o600)
    lab.settings["location"] += f"&{found[1]}={lab.path('keys')}"


def name_credentials(lab: Lab, found: Match[str]) -> None:
    lab.write("keys", KEYS).chmod(0o600)
    address = lab.settings["location"].partition("?")[0].replace("user:word@", "")
    lab.settings["location"] = f"{address}?{found[1]}={lab.path('keys')}"


# --- a bucket that answers ------------------------------------------------------------------
def probe(lab: Lab) -> None:
    with environment(lab):
        store = open_store(lab.settings["location"])
        probe_store(store, "bucket")


def begin_missing_bucket(lab: Lab) -> None:
    server = s3.server()
    lab.settings.update(location=s3.location(server).replace("s3://runs/", "s3://remedies/"))
    lab.settings.update(environment=s3.CREDENTIALS, server=server)


def create_bucket(lab: Lab, found: Match[str]) -> None:
    assert s3.ask(lab.settings["server"], "PUT", "/remedies") == 200


def faulty(status: int, code: str = "") -> Callable[[Lab], None]:
    """Begin at a bucket that answers with an error until `mend_bucket`."""

    def begin(lab: Lab) -> None:
        proxy = Proxy(s3.server())
        proxy.rule = lambda request: Fault(status, code)
        lab.settings.update(location=s3.location(proxy.address, retries=0), proxy=proxy)
        lab.settings.update(environment=s3.CREDENTIALS)

    return begin


def mend_bucket(lab: Lab, found: Match[str]) -> None:
    """What an operator does: other rights, more space."""
    lab.settings["proxy"].rule = lambda request: None


def begin_overwriting(lab: Lab) -> None:
    proxy = Proxy(s3.server())
    proxy.drop_headers = frozenset({"if-none-match"})
    lab.settings.update(location=s3.location(proxy.address), environment=s3.CREDENTIALS)


def use_honest_store(lab: Lab, found: Match[str]) -> None:
    lab.settings["location"] = s3.location(s3.server())


def begin_untrusted(lab: Lab) -> None:
    ca, tls = s3.certificates(lab.folder)
    proxy = Proxy(s3.server(), tls)
    endpoint = f"https://127.0.0.1:{proxy.address[1]}"
    lab.settings.update(location=f"s3://{s3.BUCKET}/ca?endpoint={endpoint}&retries=0", ca=ca)
    lab.settings.update(environment=s3.CREDENTIALS)


def name_authority(lab: Lab, found: Match[str]) -> None:
    lab.settings["location"] += f"&{found[1]}={lab.settings['ca']}"


# --- seals ----------------------------------------------------------------------------------
def begin_other_key(lab: Lab) -> None:
    for name, digits in (("first", "ab" * 32), ("other", "cd" * 32)):
        lab.write(name, digits).chmod(0o600)
    (lab.folder / "store").mkdir()
    open_store(f"file://{lab.path('store')}?seal={lab.path('first')}").create("data/1/a", b"x")
    lab.settings["key"] = "other"


def read_sealed(lab: Lab) -> None:
    key = lab.path(lab.settings["key"])
    assert open_store(f"file://{lab.path('store')}?seal={key}").get("data/1/a") == b"x"


# --- secrets --------------------------------------------------------------------------------
def begin_secret(content: str, mode: int, name: str = "run/secret") -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        lab.write(name, content).chmod(mode)
        lab.settings["given"] = {} if name == "run/secret" else {SECRET_FILE_VARIABLE: name}

    return begin


def take_secret(lab: Lab) -> None:
    given = {
        name: lab.path(value) if name == SECRET_FILE_VARIABLE else value
        for name, value in lab.settings["given"].items()
    }
    given_secret_file(given, lab.settings.get("cloud"))
    assert len(open_secret(lab.folder / "run", given).key) == 32


def begin_given(**variables: str) -> Callable[[Lab], None]:
    """A secret that variables give, in a cloud whose manager answers 403."""

    def begin(lab: Lab) -> None:
        lab.write("secret", HEX).chmod(0o600)
        lab.settings["given"] = variables

        def refuse(*request: object) -> bytes:
            raise SecretManagerError("the manager answers 403")

        lab.settings["cloud"] = refuse

    return begin


def unset_variable(lab: Lab, found: Match[str]) -> None:
    del lab.settings["given"][found[1]]


def give_the_right(lab: Lab, found: Match[str]) -> None:
    """Whatever the request asks for, the manager of AWS answers it."""
    lab.settings["cloud"] = lambda *request: b'{"SecretString": "%b"}' % HEX.encode()


def name_in_aws(lab: Lab, found: Match[str]) -> None:
    lab.settings["given"][SECRET_SOURCE_VARIABLE] = f"{found[1]}:run"
    give_the_right(lab, found)


def begin_foreign_secret(lab: Lab) -> None:
    begin_secret(HEX, 0o600)(lab)
    os.chown(lab.folder / "run/secret", 12345, 12345)


def remove_secret(lab: Lab, found: Match[str]) -> None:
    (lab.folder / "run/secret").unlink()


def begin_mounted_secret(lab: Lab) -> None:
    lab.write("mnt/..now/secret", HEX).chmod(0o644)
    (lab.folder / "mnt/..data").symlink_to("..now")
    (lab.folder / "mnt/secret").symlink_to("..data/secret")
    lab.settings["given"] = {SECRET_FILE_VARIABLE: "mnt/secret"}


def set_mode(lab: Lab, found: Match[str]) -> None:
    (lab.folder / "mnt/..now/secret").chmod(int(found[1], 8))


# --- sockets, addresses, notices ------------------------------------------------------------
def begin_socket(lab: Lab) -> None:
    lab.settings["places"] = [lab.path("d" * 120)]


def use_short_folder(lab: Lab, found: Match[str]) -> None:
    lab.settings["places"] = ["/tmp"]  # a test's own folder may be too long


def secure(lab: Lab) -> None:
    secure_folder(lab.folder / lab.settings["name"])


def begin_open_folder(lab: Lab) -> None:
    (lab.folder / "all").mkdir()
    (lab.folder / "all").chmod(0o777)
    lab.settings["name"] = "all"


def begin_file_in_the_way(lab: Lab) -> None:
    lab.write("file", "")
    lab.settings["name"] = "file/below"


def open_socket(lab: Lab) -> None:
    MoverSocket(lab.path(lab.settings["name"])).remove()


def listen(lab: Lab) -> None:
    host, port = lab.settings["address"]
    with bind_listener(host, port, "cluster.interface"):
        pass


def plan(lab: Lab) -> None:
    cluster = {"node": "a", "gloo_interface": lab.settings["interface"]}
    config = RunConfig.model_validate({"cluster": cluster})
    plan_addresses(config, FolderStore(lab.folder))


def notices(lab: Lab) -> None:
    given = dict(lab.settings)
    variables = given.pop("variables", {})
    cluster = RunConfig.model_validate({"cluster": given}).cluster
    with environment(lab):
        assert make_notice_source(cluster, environment=variables, root=lab.folder) is not None


def source(name: str, **given: Any) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(notices=name, **given)


def set_variables(lab: Lab, found: Match[str]) -> None:
    known = lab.settings.get("variables", {})
    lab.settings["variables"] = known | dict.fromkeys(found.groups(), "name")


def name_port(lab: Lab, found: Match[str]) -> None:
    lab.settings["notices_at"] = found[1].replace("HOST:PORT", "10.0.0.1:443")


def begin_kubernetes(lab: Lab) -> None:
    account = lab.folder / "account"
    account.mkdir()
    for name in ("token", "ca.crt", "namespace"):
        (account / name).write_text("x")
    lab.settings.update(notices="kubernetes", notices_account=str(account))


def name_node(lab: Lab) -> None:
    check_node_name(lab.settings["node"])
