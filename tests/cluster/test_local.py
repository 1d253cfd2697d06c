"""cluster/local.py with real processes: start, ready, death, stop, lock."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from areal.base.errors import ConfigError, ProcessDied
from areal.cluster import SCHEDULERS, start_scheduler
from areal.cluster.local import LocalScheduler
from areal.cluster.process_tree import how_it_ended, members
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import Job, Scheduler
from areal.config.cluster import SchedulerName
from areal.config.load import resolve
from areal.config.run import RunConfig

MakeJob = Callable[..., Job]

SERVES = "def main(spec):\n    report_ready(spec, url='http://127.0.0.1:1', got=dict(spec.job))\n    time.sleep(120)"
DEAF = "def main(spec):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    report_ready(spec)\n    time.sleep(120)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_job_starts_reports_and_stops(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("server-0", SERVES, port=0, secret="s3cret"))
        facts = await process.ready(60)
        assert facts == {"pid": process.pid, "url": "http://127.0.0.1:1", "got": {"port": 0, "secret": "s3cret"}}
        command_line = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert "s3cret" not in command_line
        assert scheduler.run_token not in command_line
        spec = tmp_path / "run" / "processes" / "server-0.spec.json"
        assert spec.stat().st_mode & 0o777 == 0o600
        assert json.loads(spec.read_text())["run_token"] == scheduler.run_token
        await process.stop()
        assert await process.wait() == 0
    assert not alive(process.pid)
    assert not spec.exists(), "the token does not stay behind"


async def test_processes_do_not_inherit_the_variables_that_keys_were_read_from(
    tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run agents' code. What the user names for agents stays."""
    for name in ("CHANNEL_KEY", "ADMIN_KEY", "NAMED_KEY", "THEIR_OWN_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    (tmp_path / "router.yaml").write_text(
        "api_gateway: {base_url: 'https://channel.invalid', api_key: '${CHANNEL_KEY}'}"
    )
    overrides = [
        "rollout.agent.admin_api_key=${ADMIN_KEY}",
        f"agent.gateway_config={tmp_path / 'router.yaml'}",
        "rollout.agent.internal_token=${NAMED_KEY}",
        "rollout.agent.process.environment=[NAMED_KEY]",
    ]
    config = resolve(None, overrides).config
    folder = RunFolder(tmp_path / "run", tmp_path / "run", tmp_path / "logs")
    shows = "def main(spec):\n    report_ready(spec, url='', environment=sorted(os.environ))\n    time.sleep(120)"
    async with start_scheduler(config, folder) as scheduler:
        [process] = await scheduler.start(job("worker-0", shows))
        environment = (await process.ready(60))["environment"]
    assert {"NAMED_KEY", "THEIR_OWN_KEY", "PATH"} < set(environment)
    assert not {"CHANNEL_KEY", "ADMIN_KEY"} & set(environment)


async def test_leaving_the_block_stops_everything_also_on_an_exception(tmp_path: Path, job: MakeJob) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with LocalScheduler(tmp_path / "run") as scheduler:
            processes = await scheduler.start(job("a", SERVES), job("b", SERVES))
            await asyncio.gather(*(process.ready(60) for process in processes))
            pids.extend(process.pid for process in processes)
            raise RuntimeError("loop failed")

    with pytest.raises(RuntimeError, match="loop failed"):
        await run()
    assert len(pids) == 2
    assert not any(map(alive, pids))


async def test_a_block_that_is_cancelled_as_it_begins_to_stop_leaves_nothing(tmp_path: Path, job: MakeJob) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with LocalScheduler(tmp_path / "run") as scheduler:
            [process] = await scheduler.start(job("c", SERVES))
            await process.ready(60)
            pids.append(process.pid)
            asyncio.get_running_loop().call_soon(task.cancel)  # comes before what stops the process has had its turn

    task = asyncio.create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids[0])


async def test_a_cancelled_block_leaves_nothing(tmp_path: Path, job: MakeJob) -> None:
    up: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with LocalScheduler(tmp_path / "run") as scheduler:
            [process] = await scheduler.start(job("deaf", DEAF))
            await process.ready(60)
            up.set_result(process.pid)
            await asyncio.sleep(120)

    task = asyncio.create_task(run())
    pid = await up
    task.cancel()  # Ctrl-C
    await asyncio.sleep(0.2)
    task.cancel()  # and again, while it waits for the deaf child
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)


async def test_a_child_that_dies_at_start_says_why(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(
            job("server-0", "def main(spec):\n    raise ConfigError('no model in /x; give one')")
        )
        with pytest.raises(ProcessDied) as death:
            await process.ready(60)
        assert await scheduler.first_death() is process
    text = str(death.value)
    assert "server-0" in text
    assert "exited with code 2" in text
    assert "error: no model in /x; give one" in text
    assert str(scheduler.log_path("server-0")) in text


async def test_a_module_that_is_absent_is_reported(tmp_path: Path) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(Job("ghost", "areal.no_such_module", {}))
        with pytest.raises(ProcessDied, match="No module named"):
            await process.ready(60)


async def test_a_child_that_never_reports_is_named_with_the_remedy(tmp_path: Path, job: MakeJob) -> None:
    body = "def main(spec):\n    print('loading ...')\n    time.sleep(120)"
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("slow", body))
        with pytest.raises(ProcessDied, match=r"slow .* did not report ready within 1 s; .*startup_timeout_seconds"):
            await process.ready(1.0)
    assert not alive(process.pid)


async def test_first_death_names_the_signal_and_its_own_last_lines(tmp_path: Path, job: MakeJob) -> None:
    body = "def main(spec):\n    print('step 7 done')\n    report_ready(spec)\n    time.sleep(120)"
    async with LocalScheduler(tmp_path / "run") as scheduler:
        other, process = await scheduler.start(job("other", SERVES), job("rank-0", body))
        await asyncio.gather(other.ready(60), process.ready(60))
        deaths = asyncio.create_task(scheduler.first_death())
        os.kill(process.pid, signal.SIGKILL)
        died = await deaths
        assert died is process
        assert "was killed by signal 9 (SIGKILL" in str(died.death())
        assert "step 7 done" in str(died.death())


async def test_a_process_that_was_stopped_is_no_death_and_its_name_is_free(tmp_path: Path, job: MakeJob) -> None:
    said = "def main(spec):\n    print('I am', spec.job['who'])\n    report_ready(spec)\n    time.sleep(120)"
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [first] = await scheduler.start(job("w", said, who="first"))
        await first.ready(60)
        with pytest.raises(ConfigError, match="runs already"):
            await scheduler.start(job("w", said, who="twin"))
        await first.stop()
        [second] = await scheduler.start(job("w", said, who="second"))
        await second.ready(60)
        assert second.last_lines() == "I am second", "lines of an earlier process of that name are not its own"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scheduler.first_death(), 0.3)


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("deaf", DEAF))
        await process.ready(60)
        await process.stop(grace_s=0.3)
        assert await process.wait() == -signal.SIGKILL


GRANDCHILDREN = """
PLAIN = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(120)"]

def main(spec):
    started = [
        subprocess.Popen(PLAIN),
        subprocess.Popen(PLAIN, start_new_session=True),            # left the group
        subprocess.Popen(PLAIN, env={}),                            # lost the mark
        subprocess.Popen(PLAIN, env={}, start_new_session=True),    # both
    ]
    middle = [sys.executable, "-c", "import subprocess as s, sys; "
        "print(s.Popen(sys.argv[1:], start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"]
    orphan = int(subprocess.run(middle + PLAIN, capture_output=True, text=True).stdout)   # its parent has ended
    time.sleep(0.5)                                                # by now they ignore SIGTERM, mostly
    report_ready(spec, pids=[each.pid for each in started] + [orphan])
    time.sleep(120)
"""


async def test_a_process_that_hangs_in_the_kernel_holds_nobody(
    tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal.cluster.local.KILL_S", 0.1)
    monkeypatch.setattr("areal.cluster.local.end", lambda *_: None)  # so does a process that SIGKILL does not reach
    caplog.set_level(logging.WARNING, logger="areal")
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("rank-0", DEAF))
        await process.ready(60)
        await asyncio.wait_for(process.stop(grace_s=0.1), 60)
        assert f"rank-0 (pid {process.pid}) cannot be ended" in caplog.text
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL


async def test_stop_reaches_the_whole_tree(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("worker-0", GRANDCHILDREN))
        pids = (await process.ready(60))["pids"]
        assert all(map(alive, pids))
        os.kill(process.pid, signal.SIGSTOP)  # keep the tree whole while it is looked at
        assert set(members(f"{scheduler._lock.marker}:worker-0:", process.pid)) == {process.pid, *pids}
        assert members(f"{scheduler._lock.marker}:worker:") == []
        os.kill(process.pid, signal.SIGCONT)
        await process.stop(grace_s=0.5)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    # One that dropped the mark *and* the session is known by its parent only, which may end first.
    assert left in ([], [pids[3]])


async def test_what_a_dead_child_leaves_is_ended_at_once(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        [process] = await scheduler.start(job("worker-0", GRANDCHILDREN))
        pids = (await process.ready(60))["pids"]
        os.kill(process.pid, signal.SIGKILL)
        await scheduler.first_death()
        left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left in ([], [pids[3]])


async def test_if_one_of_several_cannot_start_none_stays(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        with pytest.raises(ConfigError, match="run_token"):
            await scheduler.start(job("good", SERVES), job("bad", SERVES, run_token="mine"))
        assert not members(f"{scheduler._lock.marker}:")


async def test_T111_names_become_one_path_component(tmp_path: Path, job: MakeJob) -> None:
    async with LocalScheduler(tmp_path / "run") as scheduler:
        odd = job("x", SERVES)
        [process] = await scheduler.start(Job("../../évil", odd.module, {}, odd.env))
        await process.ready(60)
        assert scheduler.log_path("../../évil").parent == tmp_path / "run" / "logs"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__") == ["run"]


async def test_T093_eight_children_with_port_0_get_eight_ports(tmp_path: Path, job: MakeJob) -> None:
    body = (
        "import socket\ndef main(spec):\n    server = socket.create_server(('127.0.0.1', 0))\n"
        "    report_ready(spec, port=server.getsockname()[1])\n    time.sleep(120)"
    )
    async with LocalScheduler(tmp_path / "run") as scheduler:
        processes = await scheduler.start(*(job(f"w-{k}", body) for k in range(8)))
        facts = await asyncio.gather(*(process.ready(60) for process in processes))
        assert len({fact["port"] for fact in facts}) == 8


async def test_a_second_run_in_the_folder_is_refused_with_the_pid(tmp_path: Path) -> None:
    async with LocalScheduler(tmp_path / "run"):
        with pytest.raises(ConfigError, match=rf"in use by another run \(pid {os.getpid()} .*--output-dir"):
            async with LocalScheduler(tmp_path / "run"):
                pass
    async with LocalScheduler(tmp_path / "run"):
        pass  # free again


def test_how_a_process_ended_in_words() -> None:
    assert how_it_ended(3) == "exited with code 3"
    assert how_it_ended(-signal.SIGSEGV) == "was killed by signal 11 (SIGSEGV)"
    assert "SIGKILL" in how_it_ended(-9)
    assert "real-time" in how_it_ended(-40)


def test_the_table_knows_only_configured_names_and_refuses_the_others(tmp_path: Path) -> None:
    names = set(get_args(SchedulerName))
    assert set(SCHEDULERS) <= names
    folder = RunFolder(tmp_path, tmp_path, tmp_path / "logs")
    scheduler: Scheduler = start_scheduler(RunConfig(), folder)
    assert scheduler.run_token
    for name in names - set(SCHEDULERS):
        config = RunConfig.model_validate({"scheduler": {"type": name}})
        with pytest.raises(ConfigError, match=f"{name} cannot be used yet"):
            start_scheduler(config, folder)


@pytest.mark.parametrize(
    ("file", "remedy"), [("root", "cluster.fileroot or --output-dir"), ("logs", "logging.log_dir")]
)
def test_a_folder_that_cannot_be_made_names_the_key_that_chose_it(tmp_path: Path, file: str, remedy: str) -> None:
    (tmp_path / file).touch()
    folder = RunFolder.of(str(tmp_path / "root"), "exp", "trial", None, str(tmp_path / "logs"))
    with pytest.raises(ConfigError, match=rf"cannot make {tmp_path / file}: .+; choose {remedy} where you may write"):
        folder.create()


def test_the_scheduler_is_light() -> None:
    code = "import sys, areal.cluster, areal.cluster.child, areal.models.fetch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
