"""The table of `of_stores.py`."""

from __future__ import annotations

import re
from re import Match

from holdfast.checkpoint.mover.socket_place import make_socket_folder
from tests.cli.remedies.lab import Case, Lab, case, fixed
from tests.cli.remedies.of_stores import (
    HEX,
    KEYS,
    at,
    begin_file_in_the_way,
    begin_foreign_secret,
    begin_kubernetes,
    begin_missing_bucket,
    begin_mounted_secret,
    begin_open_folder,
    begin_other_key,
    begin_overwriting,
    begin_secret,
    begin_socket,
    begin_untrusted,
    create_bucket,
    faulty,
    listen,
    mend_bucket,
    name_authority,
    name_credentials,
    name_key_file,
    name_node,
    name_port,
    notices,
    open_location,
    open_socket,
    plan,
    probe,
    read_sealed,
    remove_secret,
    rewritten,
    run_command,
    secure,
    set_mode,
    set_variables,
    source,
    take_secret,
    use_honest_store,
    use_short_folder,
    with_file,
    write_location,
    write_option,
)

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
