"""The page over real HTTP, as `python -m areal.dashboard` serves it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "areal" / "dashboard" / "page"
ODD = "<b>&'\"/../☃"


def test_the_overview_shows_the_store_and_the_metrics(site: Any) -> None:
    now = site.get("/api/overview")
    assert now["version"] == {"label": 6, "step": 6}
    assert now["groups"] == {"running": 1, "accepted": 0, "consumed": 2}
    assert (now["running_sessions"], now["queue_limit"], now["slots"]) == (1, 16, {"free": 15, "all": 16})
    assert now["tokens"] == {"recorded": 81, "trained": 27, "masked": 9, "dropped": 36, "pending": 9}
    assert sum(now["tokens"].values()) == 2 * now["tokens"]["recorded"]
    assert now["dropped_groups"] == {"expired": 1, "reward_failed": 1}
    assert now["masked_tokens"] == {"superseded": 9}
    assert [worker["id"] for worker in now["workers"]] == ["w0"]
    curves = {curve["name"]: curve for curve in now["curves"]}
    assert list(curves) == ["train/reward", "train/loss", "train/lag_mean"]
    assert curves["train/reward"]["steps"] == list(range(1, 41))
    assert curves["train/reward"]["values"][19] is None  # NaN travels as null, and a gap stays a gap
    assert now["run"].endswith("/trial")


def test_sessions_are_listed_newest_first(site: Any) -> None:
    listed = site.get("/api/sessions")["sessions"]
    assert [one["id"] for one in listed] == [ODD, "sum-3", "sum-2", "sum-1", "sum-0"]
    assert [one["fate"] for one in listed][:3] == ["running", "dropped (reward_failed)", "dropped (expired)"]
    assert [one["id"] for one in site.get("/api/sessions", state="running")["sessions"]] == [ODD]
    assert len(site.get("/api/sessions", state="ended", limit=2)["sessions"]) == 2


def test_a_session_shows_its_tokens_as_training_sees_them(site: Any) -> None:
    shown = site.get("/api/session", id="sum-1")
    first, second = shown["interactions"]
    assert first["texts"] == ["<s>", "4", " is", " the", " sum", "\n", "⟨e2 98⟩", "<script>", "."]
    assert first["versions"] == [4] * 5 + [5] * 4
    assert first["trained"] == [True] * 9
    assert (second["trained"], second["masked_for"]) == ([False] * 9, "superseded")
    assert [message["content"] for message in second["messages"]] == ["sure?\n<img src=x onerror=alert(1)>"]
    # The reward went to the first, the second is superseded; 0.5 is the run's own discount.
    assert (first["reward"], first["credit"], second["reward"], shown["turn_discount"]) == (1.0, 1.0, None, 0.5)
    assert (shown["session"]["trained"], shown["session"]["masked"]) == (9, 9)
    assert site.get("/api/session", id="sum-0")["interactions"][0]["credit"] == 0.5
    assert site.get("/api/session", id=ODD)["session"]["id"] == ODD  # an id is data


def test_nothing_is_told_without_the_token(site: Any) -> None:
    for path in ("/", "/api/overview", "/api/sessions", "/api/session?id=sum-0"):
        for token in (None, "wrong"):
            status, _, body = site.ask(path, token=token)
            assert status == 401, path
            assert b"sum-0" not in body
            assert b"?token=" in body
    status, _, page = site.ask(f"/?token={site.token}", token=None)
    assert (status, b"<title>areal" in page) == (200, True)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "localhost@evil.example", ""]
)
def test_a_foreign_host_name_is_refused(site: Any, host: str) -> None:
    for path in ("/api/overview", f"/?token={site.token}", "/page/app.js"):
        status, _, body = site.ask(path, host=host)
        assert status in (400, 403)
        assert b"version" not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:8123", "[::1]:8123", "127.0.0.1"])
def test_a_forwarded_port_works(site: Any, host: str) -> None:
    assert site.ask("/api/overview", host=host)[0] == 200


def test_the_page_only_reads_and_has_no_other_files(site: Any) -> None:
    assert {site.ask("/api/overview", method=method)[0] for method in ("POST", "PUT", "DELETE")} == {405}
    for name in ("..%2fserver.py", "%2e%2e/server.py", "server.py", "index.html"):
        status, _, body = site.ask(f"/page/{name}")
        assert status == 404
        assert b"import" not in body
    for path, status in (("/api/session?id=unknown", 404), ("/api/sessions?limit=0", 400), ("/api/session", 400)):
        found, headers, body = site.ask(path)
        assert (found, headers["content-type"]) == (status, "application/json")
        assert json.loads(body)["error"]["message"]


def test_every_answer_forbids_foreign_content(site: Any) -> None:
    for path in (f"/?token={site.token}", "/page/app.js", "/page/style.css", "/api/overview"):
        status, headers, _ = site.ask(path)
        assert status == 200
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_the_page_needs_nothing_from_elsewhere_and_never_writes_markup() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"https?://|//cdn|@import|url\(", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), path
        assert len(text.splitlines()) <= 400


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "areal.dashboard", "--run", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "has no store.sqlite" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
