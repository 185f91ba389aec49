"""One fork server for the whole session, started by the controller of the pytest workers."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.ranks import ADDRESS, Server

if TYPE_CHECKING:
    from tests.support.s3 import Proxy

TESTS = Path(__file__).resolve().parent
REPORTED_FROM, SLOWEST = 100, 10  # seconds of all tests; files
_SERVER = pytest.StashKey[Server]()
_CACHE = pytest.StashKey[TemporaryDirectory[str]]()

# How long an example takes says how busy the machine is, not whether the code is right. The same
# examples each time, so that a change is judged by what it changes; HYPOTHESIS=search draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", settings.get_profile("search"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS", "house"))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests start processes by the hundred: compiling all that they import is done once, not in
    # each (a second of a node's start), whatever the machine's setting.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Under nohup and in a shell's background SIGHUP and SIGINT are ignored, and processes that a
    # test starts would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = hasattr(config, "workerinput")  # xdist workers inherit the address and the cache
    if not is_worker:
        config.stash[_CACHE] = TemporaryDirectory(prefix="holdfast-tests-cache-")
        os.environ["XDG_CACHE_HOME"] = config.stash[_CACHE].name
    if not is_worker and ADDRESS not in os.environ:
        server = Server()
        config.stash[_SERVER] = server
        os.environ[ADDRESS] = server.address


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # what imports make stays, and it would go through that again and again
    _import_a_share(session.config)


def _import_a_share(config: pytest.Config) -> None:
    """Each pytest worker first imports test files of its own. In a new clone each file is compiled
    once then, with its asserts, and not by every worker at the same time."""
    given = getattr(config, "workerinput", None)
    if given is None or [Path(path).resolve() for path in config.args] != [TESTS]:
        return
    number, workers = int(given["workerid"].removeprefix("gw")), given["workercount"]
    for path in sorted(TESTS.rglob("test_*.py"))[number::workers]:
        name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # the collection tells of it
            importlib.import_module(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The collector of the tests' own objects has nothing to look for in all that was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever has nothing left takes from the other: some tests take a minute, most of them none.
    It also leaves the tests of a file together, which share what they compare with."""
    if config.getvalue("dist") != "load":
        return None  # another way was asked for
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The files that took most of a long run, so that one that has grown is seen."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() < REPORTED_FROM:
        return
    terminalreporter.section(f"slowest {SLOWEST} files of {len(seconds)}")
    for path, taken in seconds.most_common(SLOWEST):
        terminalreporter.line(f"{taken:6.1f} s  {path}")


def pytest_unconfigure(config: pytest.Config) -> None:
    server = config.stash.get(_SERVER, None)
    if server is not None:
        os.environ.pop(ADDRESS, None)
        server.close()
    cache = config.stash.get(_CACHE, None)
    if cache is not None:
        cache.cleanup()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file for a tiny model, its dataset made."""
    from tests.support.nodes import prepared

    return prepared(tmp_path_factory.mktemp("run-file"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[str]:
    """The address of a staging machine."""
    from tests.support.commands import staging

    with staging(tmp_path) as address:
        yield address


@pytest.fixture(scope="module")
def undisturbed(run_file: Path, request: pytest.FixtureRequest) -> dict[int, float]:
    """The losses of one worker whom nobody disturbs, under the SETTINGS of the tests' module."""
    from tests.support.nodes import losses_of_one_worker

    return losses_of_one_worker(run_file, *request.module.SETTINGS)


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the tests' S3 server takes, where a location looks for them."""
    from tests.support import s3

    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before the tests' S3 server, with a rule for what goes wrong."""
    from tests.support import s3

    with s3.proxied() as found:
        yield found
