"""A Postgres server of the tests' own: made from the installed package, run as a user that is not root, gone at the end.

    with postgres_server() as server:
        server.url(schema)        # an empty schema of its database, over a socket in a folder that only its user may enter

Raises Missing with what to install where there is none. Debian: `apt install postgresql`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


class Missing(Exception):
    """No Postgres can run here; the message says why."""


@dataclass
class PostgresServer:
    folder: Path
    user: str
    programs: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, schema: str) -> str:
        return f"postgresql://{self.user}@/postgres?host={self.folder}&schema={schema}"

    def start(self) -> None:
        command = [self.programs / "postgres", "-D", self.folder / "data", "-k", self.folder, "-c", "listen_addresses="]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, **_as(self.user))
        deadline = time.monotonic() + 60
        while self._run("pg_isready", "-h", self.folder, check=False).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"the Postgres server does not start: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a crash does; what was acknowledged is in its log."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)
            self.process = None

    def make(self) -> None:
        self._run("initdb", "-D", self.folder / "data", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-instructions")

    def _run(self, program: str, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.programs / program, *arguments], check=check, capture_output=True, text=True, **_as(self.user)
        )


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    # In memory where there is some: tests are not about the disk, and a hundred small stores are made.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    folder = Path(tempfile.mkdtemp(prefix="areal-pg-", dir=memory if roomy else None))
    server = PostgresServer(folder, _user(), _programs())
    try:
        if os.getuid() == 0:
            shutil.chown(folder, server.user)
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    if (initdb := shutil.which("initdb")) is not None:
        return Path(initdb).resolve().parent
    raise Missing("there is no Postgres server on this machine (Debian: apt install postgresql)")


def _user() -> str:
    """Postgres refuses to run as root: then its own user, else nobody."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _as(user: str) -> dict[str, object]:
    if os.getuid() != 0:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
