"""The live page from outside: a real process, its answers, and that it changes nothing."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.events import StepDone
from holdfast.report.history.history import build_history
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import here
from tests.support.dashboards import Served, dashboard_of
from tests.support.journal_builder import Scribe, append_records, lossy_run, store_run

MAX_PAGE_BYTES = 100_000  # of all files, before data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one folder: one with a loss that is over, one that trains."""
    runs = tmp_path_factory.mktemp("runs")
    store_run(runs / "lossy", lossy_run(price={}).records, 30)
    store_run(runs / "young", _young().records, 100)
    return runs


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with dashboard_of(folder / "lossy") as found:
        yield found


def test_the_stream_has_what_the_report_has(served: Served, folder: Path) -> None:
    state = _read_state(served.events())
    story = build_history(read_journal(FolderStore(folder / "lossy")))
    assert state["state"] == "finished"
    assert [step for step, _ in state["curve"]["points"]] == [point.step for point in story.steps]
    assert [[step for step, _ in ghost] for ghost in state["curve"]["ghosts"]] == [[11, 12, 13]]
    assert (state["tokens"], state["tokens_again"]) == (story.tokens, story.recomputed_tokens)
    fleet = {name: value for name, value in story.ranks.fleet_totals().items() if value > 0}
    assert {name: value for name, value, _ in state["classes"]} == pytest.approx(fleet)
    assert state["fleet_s"] == pytest.approx(sum(fleet.values())) == pytest.approx(2 * story.wall)
    titles = [each["title"] for each in state["incident_list"]]
    assert titles == [each.title for each in reversed(story.incidents)]
    running = story.wall - story.time["stopped"]
    assert state["node_hours"] * 3600 == pytest.approx(running, abs=0.5)  # one node, from its start
    assert "usd_per_hour" in state["price_missing"]


def test_new_steps_arrive_as_a_part_of_the_curve(tmp_path: Path) -> None:
    run = _young()
    store_run(tmp_path / "run", run.records, 100)
    with dashboard_of(tmp_path / "run") as found:
        events = found.events()
        assert len(_read_state(events)["curve"]["points"]) == 3
        written = len(run.records)
        run.steps(4, 6)
        append_records(tmp_path / "run", run.records[written:])
        news = next(each for each in events if each["curve"]["points"])
        assert "reset" not in news["curve"]
        assert [step for step, _ in news["curve"]["points"]] == [4, 5, 6]
        assert "place" not in news, "what is the same is not sent again"
        assert news["step"] == 6
        run.lose(1)
        run.restart(4)
        append_records(tmp_path / "run", run.records[written + 3 :])
        news = next(each for each in events if each["curve"].get("reset"))
        assert [step for step, _ in news["curve"]["points"]] == [1, 2, 3, 4]


def test_a_folder_has_a_table_and_new_runs_appear(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    store_run(runs / "first", lossy_run().records, 30)
    with dashboard_of(runs) as found:
        events = found.events()
        rows = next(each["runs"] for each in events if each["runs"][0]["state"] != "reading")
        assert [(row["name"], row["step"], row["incidents"]) for row in rows] == [("first", 30, 1)]
        store_run(runs / "second", _young().records, 100)
        rows = next(each["runs"] for each in events if len(each["runs"]) == 2)
        state = _read_state(found.events("/events?run=second"))
        assert (state["run"], state["step"]) == ("demo", 3)


def test_only_the_token_opens_it(served: Served) -> None:
    cookie = f"holdfast_dashboard_{served.port}={served.token}"
    assert served.get("/").status == 403
    assert served.get("/state").status == 403
    assert served.get("/events", headers={"Authorization": "Bearer wrong"}).status == 403
    page = served.get(f"/?token={served.token}")
    assert page.status == 200
    assert page.headers["Set-Cookie"].startswith(cookie)
    assert {"httponly", "samesite=strict"} <= _words(page.headers["Set-Cookie"])
    assert served.get("/state", headers={"Cookie": cookie}).status == 200
    rebound = {"Cookie": cookie, "Host": "evil.example:80"}
    assert served.get("/state", headers=rebound).status == 403


def test_the_page_loads_nothing_from_other_places(served: Served) -> None:
    page = served.get(f"/?token={served.token}")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy["script-src"], policy["style-src"], policy["connect-src"]} == {"'self'"}
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    text = page.read().decode()
    assert "://" not in text
    names = ("app.js", "app.css", "uplot.min.js", "uplot.min.css")
    files = [served.get(f"/static/{name}").read() for name in names]
    assert len(text) + sum(map(len, files)) < MAX_PAGE_BYTES
    assert served.get("/static/../app.py").status == 404
    assert served.get("/static/uplot.LICENSE").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_is_read_only(method: str, served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.token}"}
    assert served.get("/state", method, headers).status == 405


def test_it_changes_no_file_of_the_run(folder: Path) -> None:
    before = _digests(folder / "young")
    with dashboard_of(folder / "young") as found:
        _read_state(found.events())
    assert _digests(folder / "young") == before


def test_it_listens_on_this_machine_alone(served: Served) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((_other_address(), served.port), 10)


def test_prices_of_the_journal_give_dollars(tmp_path: Path) -> None:
    store_run(tmp_path / "run", lossy_run(price={"usd_per_hour": 36.0}).records, 30)
    with dashboard_of(tmp_path / "run") as found:
        state = _read_state(found.events())
    assert state["usd"] == pytest.approx(36 * state["node_hours"])
    assert not state["price_missing"]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here(capsys, "dashboard", tmp_path / "missing").refuses("there is no run here")
    here(capsys, "dashboard", tmp_path).refuses("there is no run here")
    store_run(tmp_path / "run", [], 3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here(capsys, "dashboard", tmp_path / "run", "--port", port).refuses("--port", port)


def test_a_journal_with_lines_that_are_none_is_shown_as_far_as_it_is_read(tmp_path: Path) -> None:
    run = _young()
    run.write(StepDone(float("nan"), 1024, 1.0, 1e-3, 1.0, step=4))
    store_run(tmp_path / "run", run.records, 100)
    (tmp_path / "run/journal/0000000001/rank1.jsonl").write_text("no json\n")
    with dashboard_of(tmp_path / "run") as found:
        state = _read_state(found.events())
    assert (state["step"], state["loss"]) == (4, None)


def _read_state(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the first state after the journal was read, with what came before it."""
    whole: dict[str, Any] = {}
    for each in events:
        points = [] if each["curve"].get("reset") else whole["curve"]["points"]
        ghosts = each["curve"].get("ghosts", whole.get("curve", {}).get("ghosts"))
        whole |= each
        whole["curve"] = {"points": [*points, *each["curve"]["points"]], "ghosts": ghosts}
        if whole["state"] not in ("reading", "starting"):
            return whole
    raise AssertionError("the stream ended")


def _young() -> Scribe:
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, 3)
    return run


def _words(cookie: str) -> set[str]:
    return {part.strip().lower() for part in cookie.split(";")}


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _other_address() -> str:
    """An address of this machine that is not its loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def test_json_names_the_address(served: Served) -> None:
    assert served.address.startswith("http://127.0.0.1:")
    assert len(served.token) >= 32
    answer = served.get("/state", headers={"Authorization": f"Bearer {served.token}"})
    assert json.loads(answer.read())["name"] == "lossy"
