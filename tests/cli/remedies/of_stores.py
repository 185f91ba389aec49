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

from holdfast.checkpoint.mover.socket_place import MoverSocket, make_socket_folder, secure_folder
from holdfast.config.run import RunConfig
from holdfast.elastic.agent.agent import check_node_name
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.launch.addresses import plan_addresses
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.secret import SECRET_FILE_VARIABLE, open_secret
from holdfast.wire.store.location import open_store, probe_store
from holdfast.wire.store.run_store import FolderStore
from tests.cli.remedies.lab import Case, Lab, case, fixed
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
    given = {name: lab.path(value) for name, value in lab.settings["given"].items()}
    assert len(open_secret(lab.folder / "run", given).key) == 32


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
    (lab.folder / "short").mkdir()
    lab.settings["places"] = [lab.path("d" * 120)]


def use_short_folder(lab: Lab, found: Match[str]) -> None:
    lab.settings["places"] = [lab.path("short")]


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


W, L, B, N = (
    "wire/secret.py: ",
    "wire/store/location.py: ",
    "wire/store/bucket_errors.py: ",
    "elastic/notices/",
)
M = "checkpoint/mover/socket_place.py: "
ENVIRONMENT = (
    r"leave credentials in the environment, or name their file with \?(credentials)=<path>"
)
SET_CREDENTIALS = r"set them in the environment .* or name a file of them with \?credentials=<path>"


def name_plain_credentials(lab: Lab, found: Match[str]) -> None:
    lab.write("keys", KEYS).chmod(0o600)
    lab.settings["location"] += f"&credentials={lab.path('keys')}"
    mend_bucket(lab, found)


CASES: list[Case] = [
    case(
        L + "a file's address has no host and a whole path",
        at("file://shared/runs/mine"),
        open_location,
        r"write (\S+)",
        write_location,
    ),
    case(
        L + "…:// is no kind of run store",
        at("ftp://host/x"),
        open_location,
        r"use a folder, or an address that begins with (s3://), gs:// or az://",
        lambda lab, found: lab.settings.update(location=found[1] + "host/x"),
    ),
    case(
        L + "the bucket's name is missing",
        at("s3:///x"),
        open_location,
        r"write (\S+)",
        write_location,
    ),
    case(
        L + "there is no option …",
        at("s3://b/x?tiemout=3"),
        open_location,
        r"the options are .*(timeout).*",
        lambda lab, found: lab.settings.update(location=f"s3://b/x?{found[1]}=3"),
    ),
    case(
        L + "timeout is not a number of seconds",
        at("s3://b/x?timeout=soon"),
        open_location,
        r"use (timeout=\d+)",
        write_option,
    ),
    case(
        L + "retries is not a number",
        at("s3://b/x?retries=many"),
        open_location,
        r"use (retries=\d+)",
        write_option,
    ),
    case(
        (L + "compress knows zstd only", L + "compress needs seal"),
        at("file://{root}?compress=gzip"),
        open_location,
        r"use (compress=\w+)",
        write_option,
        (r"add (seal)=<path>", name_key_file),
    ),
    case(
        L + "the endpoint holds more than an address",
        at("s3://b/x?endpoint=https://u:p@host"),
        open_location,
        r"leave users, passwords and signatures to the environment or a credentials file",
        lambda lab, found: lab.settings.update(location="s3://b/x?endpoint=https://host"),
    ),
    case(
        L + "a location must hold no secret",
        at("s3://user:word@b/x"),
        open_location,
        ENVIRONMENT,
        name_credentials,
    ),
    case(
        L + "a location must hold no secret",
        at("s3://b/x?secret_key=abc"),
        open_location,
        ENVIRONMENT,
        name_credentials,
    ),
    case(
        L + "gs:// takes no endpoint",
        at("gs://b/x?endpoint=https://host"),
        open_location,
        r"use (s3)://.*",
        lambda lab, found: lab.settings.update(location="s3://b/x?endpoint=https://host"),
    ),
    case(
        L + "the endpoint is not encrypted",
        at("s3://b/x?endpoint=http://host"),
        open_location,
        r"use https://, or add (allow_http=true) where everybody on the way may read",
        lambda lab, found: lab.settings.update(location=f"{lab.settings['location']}&{found[1]}"),
    ),
    case(
        L + "the endpoint is no address",
        at("s3://b/x?endpoint=host"),
        open_location,
        r"begin it with (https://)",
        lambda lab, found: lab.settings.update(location=f"s3://b/x?endpoint={found[1]}host"),
    ),
    case(
        L + "no credentials of the profile … in this file",
        with_file("[other]\n", "s3://b/x?credentials={root}/keys"),
        open_location,
        r"write \[default\], aws_access_key_id = \.\.\. and aws_secret_access_key = \.\.\.",
        rewritten(KEYS),
    ),
    case(
        L + "a line of this file is none of …",
        with_file("key: a\n", "az://b/x?account=a&credentials={root}/keys"),
        open_location,
        r"write NAME=value, one a line",
        rewritten("AZURE_STORAGE_ACCOUNT_KEY=a2V5\n"),
    ),
    case(
        L + "other users of this machine can read these credentials",
        with_file(KEYS, "s3://b/x?credentials={root}/keys", 0o644),
        open_location,
        r"run: (chmod 600 \S+)",
        run_command,
    ),
    case(
        L + "there is no key here",
        with_file("no digits", "file://{root}?seal={root}/keys"),
        open_location,
        r"put 64 hexadecimal digits there, as (openssl rand -hex 32) does",
        lambda lab, found: run_command(lab, re.match("(.*)", f"{found[1]} > {lab.path('keys')}")),
    ),
    case(
        L + "the bucket's client cannot be made (…)",
        with_file("AZURE_STORAGE_ACCOUNT_KEY=a2V5\n", "az://b/x?credentials={root}/keys"),
        open_location,
        r"look at the endpoint, the account and the file of credentials",
        lambda lab, found: lab.settings.update(location=lab.settings["location"] + "&account=a"),
    ),
    case(
        B + "there is no such bucket",
        begin_missing_bucket,
        probe,
        r"create it, or name another",
        create_bucket,
    ),
    case(
        B + "the bucket refuses these credentials…",
        faulty(403, "AccessDenied"),
        probe,
        SET_CREDENTIALS,
        name_plain_credentials,
    ),
    case(
        B + "the bucket is full",
        faulty(507),
        probe,
        r"free some space, or use another bucket",
        mend_bucket,
    ),
    case(
        B + "(_unreachable_error)",
        begin_untrusted,
        probe,
        r"name the file of its authority's certificate with \?(ca)=<path>",
        name_authority,
    ),
    case(
        L + "the store overwrites what is there instead of refusing (it ignores If-None-Match), so "
        "two trainers could both win",
        begin_overwriting,
        probe,
        r"use one that honours it: docs/stores.md names those that were tested",
        use_honest_store,
    ),
    case(
        "wire/store/encrypted_store.py: … is sealed with another key",
        begin_other_key,
        read_sealed,
        r"name the file of the key that the run was begun with",
        fixed(key="first"),
    ),
    case(
        W + "other users of this machine can read the run's secret",
        begin_secret(HEX, 0o644),
        take_secret,
        r"remove it, or run: (chmod 600 \S+)",
        run_command,
    ),
    case(
        W + "other users of this machine can read the run's secret",
        begin_mounted_secret,
        take_secret,
        r"set defaultMode: (0400) for the Secret's volume .*",
        set_mode,
    ),
    case(
        W + "this is not a secret",
        begin_secret("no digits", 0o600),
        take_secret,
        r"write 64 hexadecimal digits into it",
        lambda lab, found: (lab.folder / "run/secret").write_text(HEX),
    ),
    case(
        W + "the run's secret belongs to another user, who knows it then",
        begin_foreign_secret,
        take_secret,
        r"remove it: a new one is made; or use a copy that is yours",
        remove_secret,
    ),
    case(
        M + "no folder can hold the mover's socket: …",
        begin_socket,
        lambda lab: make_socket_folder(lab.settings["places"]).cleanup(),
        r"set it to a folder of yours with a short path",
        use_short_folder,
    ),
    case(
        M + "other users of this machine can write where the mover's socket is to lie",
        begin_open_folder,
        secure,
        r"set TMPDIR to a folder of your own",
        fixed(name="own"),
    ),
    case(
        M + "the folder of the mover's socket cannot be made (…)",
        begin_file_in_the_way,
        secure,
        r"set TMPDIR to a folder of your own",
        fixed(name="own"),
    ),
    case(
        M + "the mover's socket cannot be made (…)",
        lambda lab: lab.settings.update(name="d" * 120),
        open_socket,
        r"set TMPDIR to a folder of your own with a short path",
        fixed(name="s"),
    ),
    case(
        "wire/http/sockets.py: cannot listen on …:… (…)",
        lambda lab: lab.settings.update(address=("192.0.2.1", 80)),
        listen,
        r"use an address of this machine and a free port \((0) takes any\)",
        lambda lab, found: lab.settings.update(address=("127.0.0.1", int(found[1]))),
    ),
    case(
        "launch/addresses.py: this machine has no network device … with an address",
        lambda lab: lab.settings.update(interface="eth99"),
        plan,
        r"use one of .*\b(lo)\b.*, or auto",
        lambda lab, found: lab.settings.update(interface=found[1]),
    ),
    case(
        "elastic/agent/agent.py: … cannot be a node's name",
        lambda lab: lab.settings.update(node="a node"),
        name_node,
        r"use letters, digits, dots, dashes and underscores",
        fixed(node="a-node"),
    ),
    case(
        N + "clouds.py: no file is named",
        source("file"),
        notices,
        r"name the file that will be written when this machine is to go",
        fixed(notices_at="/tmp/notice"),
    ),
    case(
        N + "slurm.py: this process runs in no Slurm job: SLURM_JOB_ID is not set",
        source("slurm"),
        notices,
        r"start it by sbatch or srun, or use cluster\.notices=none",
        lambda lab, found: lab.settings.update(variables={"SLURM_JOB_ID": "7"}),
    ),
    case(
        (
            N + "kubernetes.py: this process runs in no pod: KUBERNETES_SERVICE_HOST is not set",
            N + "kubernetes.py: neither the pod nor the node of this process is known",
        ),
        begin_kubernetes,
        notices,
        r"give cluster\.notices_at=(https://HOST:PORT), or use cluster\.notices=none",
        name_port,
        (r"set (\w+) and (\w+) by the downward API: see docs/notices.md", set_variables),
    ),
    case(
        N + "source.py: … is not the address of a metadata service",
        source("aws", notices_at="10.0.0.1:80"),
        notices,
        r"write (https?://HOST:PORT)",
        name_port,
    ),
]
