"""User code in processes of its own: results, errors, time-outs, memory, crashes; and nothing of the run's secrets in sight."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import CallFailed, ConfigError
from areal.base.processes import exists
from areal.cluster.program import clean_environment
from areal.rollout.pool import ProcessPool

CODE = """
import asyncio, os, signal, subprocess, sys, threading, time
LOOPS = set()

def pid(): return os.getpid()
def double(x, *, plus=0): return 2 * x + plus
def str_of(x): return str(x)
async def later(x):
    LOOPS.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    return [x, len(LOOPS)]
def raises(): raise ValueError("no good")
def hangs(): time.sleep(600)
def crashes():
    print("about to go")
    os.kill(os.getpid(), signal.SIGSEGV)
def greedy(): return len(bytearray(800 * 2**20))
def environment(): return dict(os.environ)
def speaks(): print("to", "stdout"); print("to stderr", file=sys.stderr)
def unsayable(): return {1, object()}
def nan(): return float("nan")
def leaves():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("left", "w").write(str(child.pid))
    time.sleep(600)
def forks_and_dies():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)
class Agent:
    def __init__(self): self.made_in = os.getpid()
    async def run(self, task, *, base_url): return [task, base_url, self.made_in == os.getpid()]
def call(name, *args, **kwargs): return globals()[name](*args, **kwargs)
"""

MakePool = Callable[..., AbstractAsyncContextManager[ProcessPool]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePool:
    root = Path(__file__).parents[2]
    (tmp_path / "pooled.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root))

    def made(target: str = "pooled:call", **more: Any) -> ProcessPool:
        given: dict[str, Any] = {"size": 1, "timeout_s": 60.0, "memory_mb": None, "say": lambda line: None} | more
        return ProcessPool(target, key="some.key", environment=given.pop("environment", clean_environment()), **given)

    return made


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while exists(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_plain_functions_coroutines_and_methods_give_their_results(make: MakePool) -> None:
    async with make() as pool:
        assert await pool.call("double", 4, plus=1) == 9
        with pytest.raises(CallFailed, match="no JSON value"):
            await pool.call("double", 2**70)
        assert await pool.call("str_of", {"n": 2**70}) == str({"n": 2**70}), "a task may hold any integer"
        assert await pool.call("later", 7) == [7, 1]
        assert await pool.call("later", 7) == [7, 1], "one loop serves all calls"
        assert await pool.call("pid") == await pool.call("pid") != os.getpid()
        assert str(await pool.call("nan")) == "nan", "a reward that is no number is seen as such"
    async with make("pooled:Agent", method="run") as pool:
        assert await pool.call({"a": [1]}, base_url="u") == [{"a": [1]}, "u", True]


async def test_what_goes_wrong_in_a_call_is_its_own_failure_and_the_next_one_works(make: MakePool) -> None:
    async with make(memory_mb=400, timeout_s=3.0) as pool:
        first = await pool.call("pid")
        for name, why, says in (
            ("raises", "raised", "ValueError: no good"),
            ("greedy", "raised", "MemoryError"),
            ("unsayable", "raised", "no JSON value"),
        ):
            with pytest.raises(CallFailed, match=says) as found:
                await pool.call(name)
            assert found.value.why == why
        assert await pool.call("pid") == first, "an exception costs no process"
        for name, why, says in (
            ("crashes", "died", r"signal 11 \(SIGSEGV\); it said last: about to go"),
            ("hangs", "timed_out", "longer than 3 s"),
            ("forks_and_dies", "died", "exited with code 3"),
        ):
            with pytest.raises(CallFailed, match=says) as found:
                await pool.call(name)
            assert found.value.why == why
            assert await pool.call("double", 1) == 2
        assert await pool.call("pid") != first


async def test_a_call_that_is_late_or_cancelled_leaves_no_process_behind(make: MakePool, tmp_path: Path) -> None:
    async with make(timeout_s=600.0) as pool:
        running = asyncio.create_task(pool.call("leaves"))
        async with asyncio.timeout(60):
            while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        await gone(int((tmp_path / "left").read_text()))
        child = await pool.call("pid")
    await gone(child)


async def test_only_so_many_run_at_once(make: MakePool) -> None:
    async with make(size=2) as pool:
        found = await asyncio.gather(*(pool.call("pid") for _ in range(8)))
        assert 1 <= len(set(found)) <= 2


async def test_T108_user_code_sees_only_what_is_listed(make: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAOTOKEN_API_KEY", "sk-of-the-run")
    monkeypatch.setenv("MY_SETTING", "mine")
    async with make(environment=clean_environment(["MY_SETTING", "NOT_SET"])) as pool:
        seen = await pool.call("environment")
    assert "sk-of-the-run" not in seen.values()
    assert (seen["MY_SETTING"], seen["PATH"]) == ("mine", os.environ["PATH"])
    assert "NOT_SET" not in seen


async def test_what_it_prints_is_told_to_whoever_called(make: MakePool) -> None:
    said: list[str] = []
    async with make() as pool:
        await pool.call("speaks", say=said.append)
        async with asyncio.timeout(30):
            while len(said) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert sorted(said) == ["to stderr", "to stdout"]


@pytest.mark.parametrize(
    ("target", "method", "says"),
    [
        ("pooled", None, "some.key is 'pooled'; write it as module:attribute"),
        ("nowhere:f", None, "some.key: cannot import nowhere"),
        ("pooled:nothing", None, "has no nothing"),
        ("pooled:LOOPS", None, "pooled:LOOPS is no function"),
        ("pooled:double", "run", "pooled:double has no run"),
        ("broken:f", None, r"some.key=broken:f cannot be loaded: RuntimeError: half written \(broken.py, line 1\)"),
        ("leaves:f", None, "importing leaves:f failed: its process exited with code 3"),
    ],
)
async def test_a_target_that_cannot_be_called_is_an_error_at_the_start(
    make: MakePool, tmp_path: Path, target: str, method: str | None, says: str
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('half written')\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=says):
        async with make(target, method=method):
            pass


def test_processes_end_with_the_one_that_started_them_also_in_the_middle_of_a_call(make: MakePool) -> None:
    program = """
import asyncio, os
from areal.cluster.program import clean_environment
from areal.rollout.pool import ProcessPool

async def main():
    pool = ProcessPool("pooled:call", key="k", size=2, timeout_s=600, memory_mb=None, environment=clean_environment(), say=print)
    async with pool:
        print(await pool.call("pid"), flush=True)
        await pool.call("hangs")

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 30
    while exists(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
