"""A clean clone of this repository, in which the second text is typed: only the files of the tree, none of what was built or run in it.

    clone = Clone.of(folder, channel=stub.url)         # the three things that its reader changes: model, channel, max_steps
    clone.type("python scripts/check_channel.py")

Its port is a quiet one (GATEWAY_PORT), because tests run side by side; the gateway's state lies in a folder of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.running import ROOT, WITHIN_S, Running, environment
from tests.ports import quiet_port

KEY = "sk-channel-key-of-this-test"
NEEDED = ("areal", "configs", "scripts", "agent_config.py", "requirements.txt", "pyproject.toml")


@dataclass(frozen=True)
class Clone:
    folder: Path
    port: int

    @classmethod
    def of(cls, folder: Path) -> Clone:
        """As it is printed: nothing is changed yet."""
        for name in NEEDED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        return cls(folder, quiet_port())

    def change(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))

    def give_it_a_channel(self, url: str, model: str) -> None:
        """The policy model, and the channel's address with the ids that it knows."""
        router = "configs/taotoken_router.yaml"
        self.change(router, "https://taotoken.net/api", f"{url}/api")
        self.change(router, "your-policy-model-id", model)
        self.change(router, "your-reward-model-id", "the-channels-reward-model")
        self.change(router, "your-judge-model-id", "the-channels-judge-model")

    @property
    def logs(self) -> Path:
        return self.folder / "logs" / "areal_async"

    def env(self, **more: str) -> dict[str, str]:
        own = {"TAOTOKEN_API_KEY": KEY, "GATEWAY_PORT": str(self.port), "PYTHONPATH": str(self.folder)}
        return environment(own | {"XDG_STATE_HOME": str(self.folder / ".state"), "VIRTUAL_ENV": "set"} | more)

    def type(self, command: str, *, without: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """A command line in its folder, to the end. without: a variable that this shell does not export."""
        own = {name: value for name, value in self.env(**env).items() if name != without}
        words = ["bash", "-c", command]
        return subprocess.run(words, cwd=self.folder, env=own, capture_output=True, text=True, timeout=WITHIN_S)

    def begin(self, command: str, output: Path, **env: str) -> Running:
        """A command line that goes on, in a group of its own; the caller ends it."""
        with output.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.env(**env),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, self.logs / "train.log", output)
