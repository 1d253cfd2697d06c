"""LiteLLM's proxy for comparison, in a virtual environment of its own that is kept under the cache folder.

    python = installed(report)                        # None, with the reason printed, where it cannot be had
    proxy = await start(stack, python, fake.url)

Its usual settings, one worker process, one OpenAI-compatible model behind it, no database, nothing fetched from outside.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp

from areal.models.fetch import cache_root
from areal.web.address import bind, url_of
from gateway_rig.report import Report
from gateway_rig.stack import Running, Stack

VERSION = "1.110.2"
KEY = "sk-bench"
START_S = 180.0
_CONFIG = """
model_list:
  - model_name: default
    litellm_params: {{model: openai/policy, api_base: "{url}/v1", api_key: sk-none}}
general_settings: {{master_key: {key}}}
"""

# What `litellm[proxy]` asks for, without packages of its own that are not on every index and serve a database or a licence.
_NEEDS = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for one in map(Requirement, requires("litellm")):
    if one.marker and one.marker.evaluate({"extra": "proxy"}) and not one.marker.evaluate({"extra": ""}):
        if not one.name.startswith("litellm-"):
            one.marker = None
            print(one)
"""


def installed(report: Report) -> Path | None:
    """The Python that has LiteLLM, installed now if need be."""
    folder = cache_root() / "benchmarks" / f"litellm-{VERSION}"
    python, mark = folder / "bin" / "python", folder / "complete"
    if mark.exists():
        return python
    report.note("LiteLLM", f"installing {VERSION} into {folder}, once")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        _said_by([sys.executable, "-m", "venv", "--clear", str(folder)])
        _said_by([*pip, f"litellm=={VERSION}"])
        _said_by([*pip, *_said_by([str(python), "-c", _NEEDS]).splitlines()])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        report.skipped("LiteLLM", f"{' '.join(error.cmd[1:4])} failed: {said[-1] if said else error.returncode}")
        return None
    mark.touch()
    return python


def _said_by(command: list[str]) -> str:
    """Its standard output. Raises CalledProcessError."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def start(stack: Stack, python: Path, upstream: str) -> Running:
    """Raises RuntimeError when it does not answer in time."""
    config = stack.folder / "litellm.yaml"
    config.write_text(_CONFIG.format(url=upstream, key=KEY))
    sock = bind("127.0.0.1", 0)
    url, port = url_of(sock), sock.getsockname()[1]
    sock.close()
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}
    running = await stack.program("litellm", [*command, "--port", str(port)], url=url, environment=environment)
    async with aiohttp.ClientSession() as session:
        for _ in range(int(START_S * 2)):
            try:
                async with session.get(f"{url}/health/liveliness") as response:
                    if response.status == 200:
                        return running
            except aiohttp.ClientError:
                pass
            if not running.process.is_running():
                break
            await asyncio.sleep(0.5)
    raise RuntimeError(f"LiteLLM did not answer: {stack.log('litellm')}")
