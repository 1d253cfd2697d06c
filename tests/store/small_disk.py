"""A disk of a few MiB that really fills up: a tmpfs of the test's own, mounted where the kernel lets us.

    with small_disk(folder, mib=80) as disk:
        disk.fill()      # not a byte is left
        disk.free()      # what fill() took is there again

Raises Missing where nothing may be mounted (the tests under RLIMIT_FSIZE in test_database.py run everywhere).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Missing(Exception):
    """No file system can be mounted here; the message says why."""


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, *, leave_mib: int = 0) -> None:
        """Take all but leave_mib."""
        taken = shutil.disk_usage(self.folder).free - leave_mib * 2**20
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), taken)

    def free(self) -> None:
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, *, mib: int) -> Iterator[SmallDisk]:
    folder.mkdir(exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "areal-test", str(folder)],
        capture_output=True,
        text=True,
    )
    if mount.returncode:
        raise Missing(f"no small disk can be mounted here: {mount.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
