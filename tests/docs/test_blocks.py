"""Every command block of README, docs and examples is run by a test, or is listed with the reason why not (ways.py)."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.base.guide import situation
from areal.config.command_line import parse
from areal.config.keys import keys_of
from areal.config.rollout import AgentConfig
from areal.config.run import RunConfig
from areal.config.startable import why_not
from areal.web.auth import DEFAULT_ADMIN_KEY
from tests.docs.blocks import PAGES, ROOT, SHELLS, Block, blocks
from tests.docs.ways import PROGRAMS, WAYS, way_of
from tests.proxy.service import make_service

__all__ = ["make_service"]
SHELL_BLOCKS = [block for block in blocks() if block.language in SHELLS]
COMMANDS = sorted({command for block in SHELL_BLOCKS for command in block.commands})
PROGRAM = re.compile(r"^(\$ )?(areal [a-z]+|python3?|pip|make|curl|bash|npm|export) ", re.MULTILINE)
LACKING = re.compile(r"(pip|npm) install")  # what this machine has not, and need not have
QUESTION = '{"messages": [{"role": "user", "content": "hi"}]}'
LINES = [{"pieces": ["It", " is", " 183", "<|im_end|>"]}] * 50


def how(command: str) -> str:
    way = way_of(command)
    return way.how if way else ""


def test_every_command_is_run_by_a_test_or_listed_with_the_reason() -> None:
    unknown = [f"{block}: {command}" for block in SHELL_BLOCKS for command in block.commands if way_of(command) is None]
    assert not unknown, "write how each is run into tests/docs/ways.py:\n" + "\n".join(unknown)


def test_every_line_of_the_table_is_used() -> None:
    used = {way_of(command) for command in COMMANDS}
    assert [way.pattern for way in WAYS if way not in used] == []


TRANSLATED = [(f"docs/zh/{path.name}", f"docs/{path.name}") for path in sorted((ROOT / "docs" / "zh").glob("*.md"))]
TRANSLATED.append(("README.zh.md", "README.md"))


@pytest.mark.parametrize(("translation", "original"), TRANSLATED)
def test_a_translation_prints_the_same_blocks(translation: str, original: str) -> None:
    ours, theirs = ([block.text for block in blocks() if block.page == page] for page in (translation, original))
    assert ours == theirs != []


def test_commands_stand_in_blocks_that_say_so() -> None:
    found = [str(block) for block in blocks() if block.language in ("", "text") and PROGRAM.search(block.text)]
    assert not found, "mark these as bash or console: " + ", ".join(found)


@pytest.mark.parametrize("named", sorted({way.by for way in WAYS if way.how == "test"} | set(PROGRAMS.values())))
def test_the_tests_that_are_named_exist(named: str) -> None:
    file, _, name = named.partition("::")
    assert re.search(rf"def {name}", (ROOT / file).read_text("utf-8"))


def test_every_python_program_is_run_by_a_test() -> None:
    pages = [block.page for block in blocks() if block.language == "python"]
    translated = {translation for translation, _ in TRANSLATED}
    assert sorted(set(pages) - translated) == sorted(PROGRAMS)
    for block in blocks():
        if block.language == "python":
            compile(block.text, str(block), "exec")


@pytest.mark.parametrize("command", [command for command in COMMANDS if how(command) == "dry"])
def test_a_configuration_can_start(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.replace("--config my.yaml", "--config configs/tiny.yaml"))
    if "--dry-run" in words:
        words.remove("--dry-run")
    parsed = parse(words[3 if words[1] == "-m" else 2 :])
    assert [reason for reason in why_not(parsed.config) if not LACKING.search(reason)] == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if how(command) == "launch"])
def test_what_the_launch_script_is_given_can_start(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TAOTOKEN_API_KEY", "sk-of-the-reader")
    words = shlex.split(command)
    given = words[words.index("scripts/launch_async.sh") + 1 :]
    files = ["--config", "configs/agent_async_train.yaml", "--agent-config", "agent_config.py"]
    left = [reason for reason in why_not(parse([*files, *given]).config) if not LACKING.search(reason)]
    assert [reason for reason in left if not situation("placeholder").said_in(reason)] == []  # the reader's to replace


@pytest.mark.parametrize("command", [command for command in COMMANDS if how(command) == "tool"])
def test_a_tool_runs(command: str) -> None:
    done = bash(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def service_blocks() -> list[Block]:
    return [
        block
        for block in SHELL_BLOCKS
        if not block.page.startswith("docs/zh/") and any(how(command) == "service" for command in block.commands)
    ]


@pytest.mark.parametrize("block", service_blocks(), ids=str)
async def test_a_block_plays_with_a_service(block: Block, make_service: Any) -> None:
    """As it is printed, but for the address, and KEY, which stands for the key that was printed before."""
    admin = "my-secret-admin-key" if "my-secret-admin-key" in block.text else DEFAULT_ADMIN_KEY
    service = await make_service(LINES, parts={"agent": AgentConfig(admin_api_key=admin)})
    script = "\n".join(command for command in block.commands if how(command) == "service")
    script = script.replace("http://127.0.0.1:8090", service.url)
    if "--api-key KEY" in script:
        first, *rest = script.splitlines()
        agent = f"curl -sSf {service.url}/v1/chat/completions -H \"Authorization: Bearer $KEY\" -d '{QUESTION}'"
        script = "\n".join([f"KEY=$({first} | sed -n 's/^key: //p')", agent, *rest])
        script = script.replace("--api-key KEY", "--api-key $KEY")
    done = await asyncio.to_thread(bash, f"set -euo pipefail\n{script}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"error"' not in done.stdout
    recorded = await service.store.reading.recent()
    assert any(one.session.ending in ("ended", "refreshed") for one in recorded)


def bash(script: str) -> subprocess.CompletedProcess[str]:
    """With this interpreter as `python`, `python3` and `areal`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings, and what is named by hand."""
    text = page.read_text("utf-8")
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize(
    "page", sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}), ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in LINK.findall(text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text("utf-8")))
    assert [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"docs/{path.name}" not in linked] == []


KEY = re.compile(
    r"`((?:rollout|actor|train_dataset|gconfig|saver|recover|evaluator|weights|scheduler|cluster|stats_logger)(?:\.[a-z_0-9]+)+)"
)


@pytest.mark.parametrize(
    "page", sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}), ids=lambda path: path.name
)
def test_keys_that_are_named_exist(page: Path) -> None:
    keys = set(keys_of(RunConfig))
    known = keys | {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    named = {name.rstrip(".") for name in KEY.findall(page.read_text("utf-8"))}
    assert sorted(name for name in named - known if not (ROOT / "areal" / name.replace(".", "/")).exists()) == []
