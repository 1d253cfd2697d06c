"""The page in a real browser: what it draws, and what a pointer reads. Heavy; needs Chromium."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.heavy
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]


@pytest.fixture(autouse=True)
def needs_chromium() -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; install it (apt-get install chromium) to see the page drawn")


def drawn(url: str, folder: Path) -> str:
    """The page's markup after its scripts have run."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--virtual-time-budget=4000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_draws_overview_list_and_session(site: Any, tmp_path: Path) -> None:
    start = f"{site.url}/?token={site.token}"
    overview = drawn(start, tmp_path)
    for seen in ("81 recorded", "reward of the batch", "&lt;b&gt;&amp;", "reward_failed", 'class="curve"'):
        assert seen in overview
    assert "sum-3" in drawn(f"{start}#/sessions/ended", tmp_path)
    session = drawn(f"{start}#/session/sum-1", tmp_path)
    for seen in ("superseded", "swap", "token trained p4", "token masked", "&lt;script&gt;", "&lt;img src=x"):
        assert seen in session
    assert "<img" not in session
    odd = drawn(f"{start}#/session/{urllib.parse.quote(site.odd, safe='')}", tmp_path)
    assert f"<h1>{html.escape(site.odd, quote=False)}</h1>" in odd


@pytest.fixture
def debugger(site: Any, tmp_path: Path) -> Iterator[str]:
    """host:port of the DevTools of a browser that shows the session sum-0."""
    flags = [*FLAGS, f"--user-data-dir={tmp_path}", "--remote-debugging-port=0"]
    url = f"{site.url}/?token={site.token}#/session/sum-0"
    process = subprocess.Popen([str(CHROMIUM), *flags, url], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("DevTools listening"))
    yield line.split("ws://")[1].split("/")[0]
    process.terminate()
    process.wait(20)
    process.stderr.close()


async def test_a_pointer_reads_tokens_and_curves(debugger: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://{debugger}/json/list") as answer:
            [page] = [one for one in await answer.json() if one["type"] == "page"]
        async with http.ws_connect(page["webSocketDebuggerUrl"]) as socket:

            async def see(selector: str, script: str) -> Any:
                """The value of `script` once `selector` is there; `it` is the first element that it selects."""
                look = f"const it = document.querySelector({selector!r}); if (!it) return setTimeout(look, 50);"
                promise = f"new Promise((done) => {{ (function look() {{ {look} {script} }})() }})"
                params = {"expression": promise, "awaitPromise": True}
                answer: dict[str, Any] = {}
                while "result" not in answer:  # the first page is still loading: its promises die with the blank one
                    await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": params})
                    answer = await socket.receive_json()
                result = answer["result"]
                assert "exceptionDetails" not in result, result
                return result["result"].get("value")

            tip = await see(
                ".token[data-at='6']",
                "it.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
                "const tip = document.querySelector('.tip'); done(tip.hidden ? '' : tip.innerText);",
            )
            assert re.sub(r"\s+", " ", tip) == (
                'token 6 "⟨e2 98⟩" log-prob -4.5125 (p 0.0110) version 5 kept mass 1 position 18 (output 6) use trained'
            )
            await see("header", "location.hash = '#/'; done();")
            reading = await see(
                ".chart svg",
                "const box = it.getBoundingClientRect(), x = box.left + box.width * 0.125;"
                "it.dispatchEvent(new PointerEvent('pointermove', {clientX: x}));"
                "done(document.querySelector('.chart .reading').textContent);",
            )
            assert re.fullmatch(r"step 1: 0\.\d+", reading)
