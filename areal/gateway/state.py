"""Two small files in the user's state folder by which a gateway and a training run find and trust each other.

    gateway-<port>.json       written by a gateway: {"port", "pid", "url", "secret"}
    gateway-<port>.run.json   written by the run that uses it (or by a gateway that was started with a run): the facts of
                              RunFacts, its keys among them

Both have mode 0600 and lie in ${XDG_STATE_HOME:-~/.local/state}/areal (0700). Secrets and keys travel in these files and
never over the port: a relay or a stranger on the port learns nothing. A gateway that restarts reads the second file
again and serves the same run. Used by attach.py (the run's side) and attachment.py (the gateway's side).
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from areal.base.atomic import write_atomic
from areal.base.errors import ConfigError
from areal.base.processes import exists
from areal.base.redact import hint

_Facts = TypeVar("_Facts", bound=msgspec.Struct)


class GatewayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A running gateway. secret: proves both sides to each other (control.py). log: its gateway.log. born: see `birth`."""

    port: int
    pid: int
    url: str
    secret: str
    log: str = ""
    born: str = ""

    def __repr__(self) -> str:
        return f"GatewayFacts(port={self.port}, pid={self.pid}, url={self.url!r})"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has to know of a run. pid, born: its controller's; the run is over when that process is. channel_token: new at
    every start of the run, opens the upstream models. channel_models: those the run cannot do without, role -> model_id."""

    run_id: str
    pid: int
    store_url: str
    signing_key_path: str
    admin_api_key: str
    model_names: tuple[str, ...] = ("default",)
    internal_token: str | None = None
    channel_token: str | None = None
    channel_models: dict[str, str] = {}
    born: str = ""

    def __repr__(self) -> str:
        return f"RunFacts(run_id={self.run_id!r}, pid={self.pid}, store_url={hint(self.store_url)!r})"


def state_folder() -> Path:
    """The user's folder for such files; made if absent."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(base) / "areal"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def gateway_file(port: int) -> Path:
    return state_folder() / f"gateway-{port}.json"


def run_file(port: int) -> Path:
    return state_folder() / f"gateway-{port}.run.json"


def write(path: Path, facts: GatewayFacts | RunFacts) -> None:
    """Atomic, mode 0600; the process's birth is added."""
    write_atomic(path, msgspec.json.encode(msgspec.structs.replace(facts, born=birth(facts.pid))))


def read_gateway(port: int) -> GatewayFacts | None:
    """None: no gateway of this user has written one, or its process has ended."""
    facts = _read(gateway_file(port), GatewayFacts)
    return facts if facts is not None and alive(facts.pid, facts.born) else None


def read_run(port: int) -> RunFacts | None:
    """None: no run is attached to the gateway on this port, or its process has ended."""
    facts = _read(run_file(port), RunFacts)
    return facts if facts is not None and alive(facts.pid, facts.born) else None


def remove(path: Path, pid: int) -> None:
    """Remove a file if this process wrote it; another's is left alone."""
    facts = _read(path, _Owner)
    if facts is None or facts.pid == pid:
        path.unlink(missing_ok=True)


def birth(pid: int) -> str:
    """When a process began, as a word that no later process of this id shares; empty where /proc does not say.

    In containers and after a reboot ids are given again soon, often to the very same program."""
    try:
        began = _stat(pid)[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{began}"
    except (OSError, IndexError):
        return ""


def alive(pid: int, born: str = "") -> bool:
    """Whether a process of this id, born then, exists and has not ended (a zombie has)."""
    if not exists(pid):
        return False
    now = birth(pid)
    if born and now and now != born:
        return False
    with suppress(OSError, IndexError):
        return _stat(pid)[0] not in ("Z", "X")
    return True


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the program's name (which may hold anything): state first, start time 20th."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class _Owner(msgspec.Struct):
    pid: int


def _read(path: Path, kind: type[_Facts]) -> _Facts | None:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(f"{path} may be read or written by others; remove it and start the gateway anew")
            return msgspec.json.decode(file.read(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it and start the gateway anew") from None
