"""cluster/child.py: the spec file, the ready file, exit codes and the end of an orphan. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import ConfigError
from areal.cluster.child import GARBAGE_OBJECTS, read_spec, report_ready


def write_spec(folder: Path, mode: int = 0o600, **changes: Any) -> Path:
    path = folder / "child.spec.json"
    content = {
        "name": "child",
        "run_dir": str(folder),
        "run_token": "secret",
        "ready_file": str(folder / "child.ready.json"),
        "parent_pid": os.getpid(),
        "port": 0,
    }
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))
    path.chmod(mode)
    return path


def start(folder: Path, body: str, spec: Path) -> subprocess.Popen[str]:
    script = folder / "child.py"
    script.write_text(body)
    return subprocess.Popen(
        [sys.executable, str(script), "--spec", str(spec)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(folder: Path, body: str, **changes: Any) -> tuple[int, str]:
    child = start(folder, body, write_spec(folder, **changes))
    _, errors = child.communicate(timeout=60)
    return child.returncode, errors


def test_a_spec_is_typed_and_keeps_the_jobs_own_keys(tmp_path: Path) -> None:
    spec = read_spec(["--spec", str(write_spec(tmp_path))])
    assert (spec.name, spec.run_dir, spec.run_token, spec.parent_pid) == ("child", tmp_path, "secret", os.getpid())
    assert spec.job == {"port": 0}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_spec_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="other users"):
        read_spec(["--spec", str(write_spec(tmp_path, mode=mode))])


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ("[]", "not an object"), ('{"name": "x"}', "lacks run_dir"), ("\x00", "not JSON")],
)
def test_a_broken_spec_is_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = write_spec(tmp_path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_spec(["--spec", str(path)])


def test_wrong_types_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parent_pid"):
        read_spec(["--spec", str(write_spec(tmp_path, parent_pid="1"))])
    with pytest.raises(ConfigError, match="cannot read the spec"):
        read_spec(["--spec", str(tmp_path / "absent.json")])


def test_ready_is_atomic_and_private(tmp_path: Path) -> None:
    spec = read_spec(["--spec", str(write_spec(tmp_path))])
    report_ready(spec, url="http://127.0.0.1:1", version=3)
    assert json.loads(spec.ready_file.read_text()) == {"pid": os.getpid(), "url": "http://127.0.0.1:1", "version": 3}
    assert spec.ready_file.stat().st_mode & 0o777 == 0o600
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["child.ready.json", "child.spec.json"]


HEAD = "from areal.base.errors import *\nfrom areal.cluster.child import *\nimport asyncio, os, signal, sys, time\n"


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("def main(spec): pass", 0, ""),
        ("async def main(spec): pass", 0, ""),
        ("def main(spec): raise ConfigError('no such key')", 2, "error: no such key"),
        ("def main(spec): raise TrainingError('NaN')", 1, "error: TrainingError: NaN"),
        ("async def main(spec): open('/absent')", 1, "No such file or directory: '/absent'"),
        ("def main(spec): 1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("def main(spec): sys.exit(7)", 7, ""),
        (
            "async def main(spec):\n async def fail(): raise StoreError('disk full')\n"
            " async with asyncio.TaskGroup() as group: group.create_task(fail())",
            1,
            "error: StoreError: disk full",
        ),
    ],
)
def test_exceptions_become_one_line_and_a_code(tmp_path: Path, body: str, code: int, last: str) -> None:
    got, errors = run(tmp_path, HEAD + body + "\nrun_child(main)\n")
    lines = errors.strip().splitlines()
    assert got == code, errors
    assert last in (lines[-1] if lines else "")
    if last.startswith("error"):
        assert len(lines) == 1, "an expected error has no traceback"


@pytest.mark.parametrize(
    "body",
    [
        "def main(spec):\n try: report_ready(spec); time.sleep(60)\n finally: print('unwound', file=sys.stderr)\n",
        "async def main(spec):\n try: report_ready(spec); await asyncio.sleep(60)\n"
        " finally: print('unwound', file=sys.stderr)\n",
    ],
)
def test_sigterm_unwinds_and_exits_0(tmp_path: Path, body: str) -> None:
    child = start(tmp_path, HEAD + body + "run_child(main)\n", write_spec(tmp_path))
    wait_for(tmp_path / "child.ready.json")
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors.strip()) == (0, "unwound")


ORPHAN = """
import subprocess
def main(spec):
    {trap}
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
        "print(flush=True); time.sleep(120)"], stdout=subprocess.PIPE)
    grandchild.stdout.readline()    # from now on it ignores SIGTERM
    report_ready(spec, grandchild=grandchild.pid)
    time.sleep(120)
if __name__ == "__main__":
    import areal.cluster.child as child
    def watch(spec): stop_on_parent_death(spec, grace_s=1.0)
    child.stop_on_parent_death, original = watch, child.stop_on_parent_death
    stop_on_parent_death = original
    run_child(main)
"""


@pytest.mark.parametrize("trap", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["polite", "deaf"])
def test_an_orphan_ends_itself_and_its_group(tmp_path: Path, trap: str) -> None:
    """The parent is a real process that is killed; the child and its signal-proof grandchild end by themselves."""
    script = tmp_path / "child.py"
    script.write_text(HEAD + ORPHAN.format(trap=trap))
    parent_body = f"""
import json, os, subprocess, sys, time
spec = json.loads(open({str(write_spec(tmp_path))!r}).read()) | {{"parent_pid": os.getpid()}}
open({str(tmp_path / "child.spec.json")!r}, "w").write(json.dumps(spec))
subprocess.Popen([sys.executable, {str(script)!r}, "--spec", {str(tmp_path / "child.spec.json")!r}],
    start_new_session=True, stderr=open({str(tmp_path / "log")!r}, "w"))
time.sleep(120)
"""
    parent = subprocess.Popen([sys.executable, "-c", parent_body])
    ready = json.loads(wait_for(tmp_path / "child.ready.json").read_text())
    parent.kill()
    parent.wait()
    assert ended(ready["pid"]), (tmp_path / "log").read_text()
    assert ended(ready["grandchild"])
    assert "controller" in (tmp_path / "log").read_text()


def test_a_child_of_a_dead_controller_does_not_start(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    body = HEAD + "def main(spec): time.sleep(60)\nrun_child(main)\n"
    code, errors = run(tmp_path, body, parent_pid=gone.pid)
    assert code in (0, -signal.SIGTERM, -signal.SIGKILL)
    assert "is gone" in errors


def test_imported_modules_are_no_work_for_the_garbage_collector(tmp_path: Path) -> None:
    body = (
        HEAD + "def main(spec):\n    import gc; print(gc.get_freeze_count(), gc.get_threshold()[0], file=sys.stderr)\n"
    )
    code, errors = run(tmp_path, body + "run_child(main)\n")
    frozen, objects = map(int, errors.split())
    assert (code, objects) == (0, GARBAGE_OBJECTS)
    assert frozen > 1000


def wait_for(path: Path, seconds: float = 60.0) -> Path:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path


def ended(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
