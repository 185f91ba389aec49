"""Secrets from the environment, and from the managers of three clouds. AWS is moto over real HTTP.
Google and Azure are servers of this file that answer only to what their documentation asks for.
None of the real clouds was ever asked."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from holdfast.errors import RunFolderError, StoreError
from holdfast.launch.run.runs import read_secrets
from holdfast.wire.secret import (
    SECRET_FILE_VARIABLE,
    SECRET_SOURCE_VARIABLE,
    SECRET_VARIABLE,
    Secret,
    given_secret_file,
    open_secret,
    read_secret,
)
from holdfast.wire.secret_managers import aws
from holdfast.wire.secret_managers.request import ask
from tests.support import s3


def test_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    secret = open_secret(tmp_path / "run", {})
    path = tmp_path / "run" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_secret(tmp_path / "run", {}) == secret
    assert len(secret.key) == 32
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_makers_at_the_same_time_agree(tmp_path: Path) -> None:
    found: list[Secret] = []
    start = threading.Barrier(6)

    def make() -> None:
        start.wait(120)
        found.append(open_secret(tmp_path, {}))

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 6
    assert len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    open_secret(tmp_path, {})
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(RunFolderError, match="chmod 600"):
        open_secret(tmp_path, {})


@pytest.mark.parametrize("content", ["", "abc", "not hexadecimal", "ab" * 15, "é"])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(RunFolderError, match="not a secret"):
        open_secret(tmp_path, {})


def test_the_launcher_names_a_file(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("11" * 32 + "\n")
    path.chmod(0o600)
    secret = open_secret(tmp_path / "run", {SECRET_FILE_VARIABLE: str(path)})
    assert secret.key == b"\x11" * 32
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunFolderError, match="missing"):
        open_secret(tmp_path / "run", {SECRET_FILE_VARIABLE: str(tmp_path / "nowhere")})


def test_it_does_not_show_itself() -> None:
    secret = Secret(b"\xab" * 32)
    assert "ab" * 4 not in f"{secret!r} {secret} {[secret]}"


def test_a_secret_that_another_user_wrote_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "secret"
    path.write_text("00" * 32)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(RunFolderError, match="belongs to another user"):
        read_secret(path)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A file behind links, as Kubernetes mounts a Secret."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "secret").write_text("11" * 32)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    return tmp_path / "secret"


@pytest.fixture
def as_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file seems to be root's."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        fields = list(real(fd))
        fields[4] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("mode", [0o440, 0o640])
@pytest.mark.usefixtures("as_roots")
def test_a_clusters_file_that_a_group_reads_is_taken_with_a_note(mounted: Path, mode: int) -> None:
    mounted.chmod(mode)
    said: list[str] = []
    secret = open_secret("run", {SECRET_FILE_VARIABLE: str(mounted)}, said.append)
    assert secret.key == b"\x11" * 32
    (note,) = said
    assert note.startswith(f"{mounted}: the users of group ")


@pytest.mark.parametrize("mode", [0o444, 0o644, 0o660, 0o460])
@pytest.mark.usefixtures("as_roots")
def test_a_clusters_file_that_all_read_names_the_clusters_setting(mounted: Path, mode: int) -> None:
    mounted.chmod(mode)
    with pytest.raises(RunFolderError, match=r"set defaultMode: 0400 .*fsGroup"):
        open_secret("run", {SECRET_FILE_VARIABLE: str(mounted)})


def test_a_group_that_reads_a_users_own_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("11" * 32)
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    with pytest.raises(RunFolderError, match=r"chmod 600|belongs to another user"):
        open_secret("run", {SECRET_FILE_VARIABLE: str(path)})


HEX = "7a" * 32
KEY = bytes.fromhex(HEX)
TOKEN = {"authorization": "Bearer a-token"}


@contextmanager
def answering(answers: list[tuple[str, Mapping[str, str], object]]) -> Iterator[str]:
    """A server of a cloud. answers: path and headers that a request must have, and the answer's
    JSON, or the address that it redirects to. Any other request is answered 403."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            for path, headers, value in answers:
                if path == self.path and all(self.headers[k] == v for k, v in headers.items()):
                    if isinstance(value, str):
                        self.send_response(302)
                        self.send_header("location", value)
                        self.end_headers()
                        return
                    self._send(200, value)
                    return
            self._send(403, {"error": {"status": "PERMISSION_DENIED"}})

        def _send(self, status: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# --- the environment ----------------------------------------------------------------------------
def test_a_secret_of_the_environment_moves_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_FILE_VARIABLE, "")  # so that its new value is undone
    monkeypatch.setenv(SECRET_VARIABLE, HEX)
    assert open_secret(tmp_path / "run").key == KEY
    assert SECRET_VARIABLE not in os.environ
    assert HEX not in " ".join(os.environ.values())
    assert os.environ[SECRET_FILE_VARIABLE].startswith("/proc/")
    assert [secret.key for secret in read_secrets(tmp_path / "run")] == [KEY]  # and again
    child = "import os; print(open('/proc/self/environ').read(), os.listdir('/proc/self/fd'))"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, check=True)
    assert HEX.encode() not in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_command_line_hides_it_before_anything_else() -> None:
    from holdfast.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_FILE_VARIABLE, "")
        patch.setenv(SECRET_VARIABLE, HEX)
        main(["config", "--help"])
        assert SECRET_VARIABLE not in os.environ
        assert open_secret("nowhere").key == KEY


# --- clouds -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def aws_environ() -> dict[str, str]:
    """Of a machine of AWS with a secret `run/secret`."""
    host, port = s3.server()
    environ = {
        **s3.CREDENTIALS,
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    made = json.dumps({"Name": "run/secret", "SecretString": HEX, "ClientRequestToken": "t" * 32})
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": f"{host}:{port}",
        "x-amz-date": "20261126T120000Z",
        "x-amz-target": "secretsmanager.CreateSecret",
    }
    signer = aws.Credentials(*s3.CREDENTIALS.values())
    signed = aws.authorization(signer, "eu-west-1", headers, made.encode())
    url = environ["AWS_ENDPOINT_URL"] + "/"
    ask("POST", url, {**headers, "authorization": signed}, made.encode())
    return environ


def test_aws(aws_environ: dict[str, str]) -> None:
    given = {**aws_environ, SECRET_SOURCE_VARIABLE: "aws:run/secret"}
    assert open_secret("nowhere", given).key == KEY
    assert SECRET_SOURCE_VARIABLE not in given
    with pytest.raises(RunFolderError, match=r"aws:other could not .*ResourceNotFoundException"):
        open_secret("nowhere", {**aws_environ, SECRET_SOURCE_VARIABLE: "aws:other"})


def test_aws_by_the_role_of_the_machine(aws_environ: dict[str, str]) -> None:
    role = {"AccessKeyId": "test", "SecretAccessKey": "s", "Token": "session"}
    asked: list[tuple[str, str]] = []

    def machine(method: str, url: str, headers: Mapping[str, str], body: bytes) -> bytes:
        asked.append((method, url.partition("/latest/")[2]))
        if url.startswith("http://169.254.169.254/"):
            if method == "PUT":
                return b"imds"
            assert headers == {"x-aws-ec2-metadata-token": "imds"}
            path = url.partition("/meta-data/")[2]
            return {
                "placement/region": b"eu-west-1",
                "iam/security-credentials/": b"trainer",
                "iam/security-credentials/trainer": json.dumps(role).encode(),
            }[path]
        assert headers["x-amz-security-token"] == "session"
        return ask(method, url, headers, body)

    endpoint = {"AWS_ENDPOINT_URL": aws_environ["AWS_ENDPOINT_URL"]}
    given = {**endpoint, SECRET_SOURCE_VARIABLE: "aws:run/secret"}
    given_secret_file(given, machine)
    assert open_secret("nowhere", given).key == KEY
    assert asked[0] == ("PUT", "api/token")


def test_the_signature_is_that_of_amazons_own_library() -> None:
    headers = {"content-type": "application/x-amz-json-1.1", "x-amz-target": "a.B"}
    request = AWSRequest("POST", "https://h.example/", dict(headers), b"{}")
    SigV4Auth(BotoCredentials("id", "key"), "secretsmanager", "r").add_auth(request)
    date = request.headers["X-Amz-Date"]
    signed = {**headers, "host": "h.example", "x-amz-date": date}
    ours = aws.authorization(aws.Credentials("id", "key"), "r", signed, b"{}")
    assert ours == request.headers["Authorization"]


def test_google() -> None:
    secret = {"payload": {"data": base64.b64encode(HEX.encode()).decode(), "dataCrc32c": "0"}}
    name = "projects/p/secrets/run"
    flavor = {"Metadata-Flavor": "Google"}
    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    answers: list[tuple[str, Mapping[str, str], object]] = [
        (token, flavor, {"access_token": "a-token"}),
        (f"/v1/{name}/versions/latest:access", TOKEN, secret),
    ]
    with answering(answers) as address:
        environ = {
            "GCE_METADATA_HOST": address,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"http://{address}/",
        }
        source = {SECRET_SOURCE_VARIABLE: f"google:{name}"}
        with pytest.raises(RunFolderError, match="checksum is wrong"):
            open_secret("nowhere", {**environ, **source})
        secret["payload"]["dataCrc32c"] = "580247828"
        assert open_secret("nowhere", {**environ, **source}).key == KEY
        denied = {SECRET_SOURCE_VARIABLE: "google:projects/p/secrets/other"}
        with pytest.raises(RunFolderError, match=r"answers 403 \(PERMISSION_DENIED\)"):
            open_secret("nowhere", {**environ, **denied})


def test_azure() -> None:
    identity = (
        "/metadata/identity/oauth2/token?api-version=2018-02-01"
        "&resource=https%3A%2F%2Fvault.azure.net&client_id=c"
    )
    answers: list[tuple[str, Mapping[str, str], object]] = [
        (identity, {"Metadata": "true"}, {"access_token": "a-token"}),
        ("/secrets/run?api-version=7.4", TOKEN, {"value": HEX}),
        ("/secrets/moved?api-version=7.4", TOKEN, "http://127.0.0.1:1/stolen"),
    ]
    with answering(answers) as address:
        vault = "https://keys.vault.azure.net"

        def near(method: str, url: str, headers: Mapping[str, str], body: bytes) -> bytes:
            return ask(method, url.replace(vault, f"http://{address}"), headers, body)

        environ = {"AZURE_POD_IDENTITY_AUTHORITY_HOST": f"http://{address}", "AZURE_CLIENT_ID": "c"}
        given = {**environ, SECRET_SOURCE_VARIABLE: "azure:keys/run"}
        given_secret_file(given, near)
        assert open_secret("nowhere", given).key == KEY
        with pytest.raises(RunFolderError, match="answers 302"):
            given_secret_file({**environ, SECRET_SOURCE_VARIABLE: "azure:keys/moved"}, near)


def test_a_folder_out_of_reach_is_no_lost_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new secret would lock the run's other nodes out."""

    def fail(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", fail)
        with pytest.raises(StoreError, match=re.escape("out of reach (Stale file handle)")):
            open_secret(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
