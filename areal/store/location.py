"""Which store a run has: for the run that starts, and for whoever looks at its folder later.

    url = choose_store(folder, config.store.url, run_id)     # a run; also keeps it in the folder, for the others
    url = find_store(folder)                                 # dashboard, status, export; ConfigError where there is none

Without store.url it is store.sqlite in the run's folder. With one it is a schema of that database which the run has to itself, named
after its run id; the whole URL, password and all, is kept in store.url (mode 0600). A run never changes from one to the other.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from areal.base.atomic import write_atomic
from areal.base.errors import ConfigError
from areal.store import store_url

FILE, ADDRESS = "store.sqlite", "store.url"


def has_store(folder: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (folder / FILE).exists() or (folder / ADDRESS).exists()


def find_store(folder: Path) -> str:
    """The URL of the store of the run in `folder`. Raises ConfigError if none has begun there."""
    if (folder / ADDRESS).exists():
        return (folder / ADDRESS).read_text().strip()
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder} has no {FILE}; give the folder of a run (it holds config.yaml and logs/)")
    return store_url((folder / FILE).absolute())


def choose_store(folder: Path, configured: str | None, run_id: str) -> str:
    """The URL of the store for the run in `folder`. Raises ConfigError where the run has its sessions elsewhere."""
    if configured is None:
        if (folder / ADDRESS).exists():
            raise ConfigError(
                f"the sessions of {folder} lie in a database, see {ADDRESS} there: set store.url again, or choose another trial_name"
            )
        return store_url((folder / FILE).absolute())
    if (folder / FILE).exists():
        raise ConfigError(
            f"the sessions of {folder} lie in its {FILE}: take store.url out, or choose another trial_name"
        )
    url = f"{configured}{'&' if '?' in configured else '?'}schema={schema_of(run_id)}"
    write_atomic(folder / ADDRESS, f"{url}\n".encode())
    return url


def schema_of(run_id: str) -> str:
    """A schema's name that tells people which run it is, and that no other run has."""
    words = re.sub(r"[^a-z0-9]+", "_", run_id.lower()).strip("_")[:40]
    return f"areal_{words}_{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
