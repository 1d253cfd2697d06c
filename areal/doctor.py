"""One run of an agent against a fresh gateway and worker, before any training: what would be trained, what not, and what to change.

    areal doctor --agent "python agent.py" --script answers.jsonl
    areal doctor --agent "python agent.py" actor.path=Qwen/Qwen3-0.6B          # your model answers, on the CPU
    areal doctor --agent "claude -p 'list the files' --bare" --config config.yaml --json

The same processes as a run has, in a folder of their own, and nothing that trains. What the agent prints goes to standard error, the
report to standard output. Exit codes: 0 trainable, 1 tokens would be lost or the agent failed, 2 a wrong command line or
configuration, 130 interrupted. docs/doctor.md tells more; tools/doctor does the judging. No torch in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.base.atomic import write_atomic
from areal.base.errors import ArealError, ConfigError
from areal.base.logs import open_log
from areal.base.redact import redact
from areal.base.types import Limits
from areal.cluster import start_scheduler
from areal.cluster.program import Ended, run_program
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import unless_a_process_dies
from areal.config.agents import ProcessConfig
from areal.config.backend_spec import parse_backend
from areal.config.load import resolve as resolve_config
from areal.config.rollout import AgentConfig, ScriptedConfig
from areal.config.run import EvaluatorConfig, RunConfig
from areal.config.show import masked_yaml
from areal.config.startable import refuse_unstartable
from areal.config.store import StoreConfig
from areal.inference.scripted.script import read_script
from areal.launch import Launch, loopback_past_proxies
from areal.models.fetch import resolve
from areal.rollout.staleness import StalenessGate
from areal.store import open_store, store_url
from areal.store.location import has_store
from areal.tools.doctor.diagnosis import diagnose
from areal.tools.doctor.findings import Requests, Setting, judge
from areal.tools.doctor.report import Report, as_json, as_text
from areal.web.client import JsonClient, open_session

TIMEOUT_S = 300.0
IDLE_S = 15.0  # calls in flight when the agent ends are recorded by then
ROOM = Limits(max_concurrent=100_000, max_lag=0, batch_groups=100_000)  # no session waits for a slot here
# Where neither a model nor a script is named: an agent's plumbing can be seen with any answer.
ANSWERS = '{"pieces": ["I", " see", ".", "<|im_end|>"]}\n{"pieces": ["That", " is", " done", ".", "<|im_end|>"]}\n'
_ANSWERED = re.compile(r'areal_gateway_requests_total\{route="([^"]*)",status="(\d+)"\} ([\d.e+]+)')
_OURS = frozenset({("metrics", 200), ("health", 200), ("start_session", 200)})


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line. session: the task id of a session that is started for the agent, else it comes with the internal token."""

    config: RunConfig
    agent: str
    script: str | None
    session: str | None
    port: int
    timeout_s: float
    json: bool
    output_dir: Path | None


async def examine(command: Command, root: Path) -> Report:
    """Start everything in `root`, run the agent, stop, read the rows, judge. Raises ArealError with the reason if a process cannot
    start or dies."""
    config = command.config
    folder = RunFolder.of(str(root), config.experiment_name, config.trial_name, str(root), None)
    folder.create()
    config = _for_one_agent(command, folder)
    write_atomic(folder.root / "config.yaml", masked_yaml(config).encode())
    with open_log(folder.logs / "train.log", run_id="doctor", terminal=False):
        async with await open_store(store_url(folder.store_path)) as store:
            by_itself = config.rollout.agent.reward_source != "client"
            gate = await StalenessGate.open(store.training, replace(ROOM, scored=by_itself), incarnation="doctor")
            run, url, requests = await _play(command, config, folder, gate)
            await store.sessions.expire(time.time() + 1, [])  # what the agent left open ends as it would by idling
            # What the run would reward by itself counts as rewarded: nobody is asked here.
            await store.rewards.write({one.session.id: {} for one in await store.rewards.waiting()})
            found = await diagnose(store, turn_discount=config.rollout.agent.turn_discount)
    agent = config.rollout.agent
    setting = Setting(
        url=url,
        model=config.actor.path,
        scripted=parse_backend(config.rollout.backend).name == "scripted",
        style=agent.export_style,
        max_turns=agent.max_turns,
        n_samples=config.gconfig.n_samples,
        reward_key=agent.reward_key,
        reward_source=agent.reward_source,
        explicit=command.session is not None,
        timeout_s=command.timeout_s,
    )
    return Report(
        found=found,
        command=command.agent,
        run=run,
        findings=judge(found, run, requests, setting),
        answered_by=_answered_by(command),
        style=agent.export_style,
        rollouts=config.train_dataset.batch_size * config.gconfig.n_samples,
    )


def _for_one_agent(command: Command, folder: RunFolder) -> RunConfig:
    """The configuration with an agent that comes over HTTP, a gateway of its own, and whatever answers. Raises ConfigError."""
    config, script = command.config, command.script
    if script is None and not config.actor.path:
        script = str(folder.root / "answers.jsonl")
        write_atomic(Path(script), ANSWERS.encode())
    if script is not None:
        read_script(script)  # a wrong line is said before anything starts
    own: dict[str, object] = {
        "mode": "online",
        "gateway_port": command.port,
        "command": None,
        "framework": None,
        "process": ProcessConfig(),
    }
    if not config.rollout.agent.internal_token:
        own["max_turns"] = AgentConfig().max_turns  # what is set is for agents that a run starts
    rollout: dict[str, object] = {"workers": 1, "agent": config.rollout.agent.model_copy(update=own)}
    if script is not None:
        rollout |= {"backend": "scripted:d1", "scripted": ScriptedConfig(path=script)}
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "train_dataset": config.train_dataset.model_copy(update={"path": None}),
            "evaluator": EvaluatorConfig(),
            "store": StoreConfig(),
        }
    )
    refuse_unstartable(config)
    # Behind the check: sessions that open by themselves are a task each, which a run with several tries of a task refuses.
    token = {"internal_token": config.rollout.agent.internal_token or f"sk-doctor-{secrets.token_urlsafe(16)}"}
    agent = config.rollout.agent.model_copy(update=token)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"agent": agent})})


def _answered_by(command: Command) -> str:
    model, script = command.config.actor.path, command.script
    if script is None and model:
        return f"the model {model}"
    said = f"the script {script}" if script else "two built-in sentences (--script FILE or actor.path=… for more)"
    return f"{said}, in the tokens and the template of {model}" if model else f"{said}, in a plain ChatML template"


async def _play(
    command: Command, config: RunConfig, folder: RunFolder, gate: StalenessGate
) -> tuple[Ended, str, Requests]:
    """The agent's run, the gateway's URL, and what the gateway answered; every process is stopped by then."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(start_scheduler(config, folder))
        model_dir = await asyncio.to_thread(_model_dir, config)
        launch = Launch(config, folder, scheduler, gate, model_dir, "doctor", store_url(folder.store_path))
        await launch.servers_alone(stack)
        workers, url = await launch.front(stack, attach=False)
        _say(f"gateway at {url}; the agent starts now")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **await _environment(command, config, url)}
        agent = run_program(["/bin/sh", "-c", command.agent], environment, timeout_s=command.timeout_s, out=_show)
        run = await unless_a_process_dies(agent, scheduler)
        await _until_idle(workers)
        return run, url, await _requests(url)


def _model_dir(config: RunConfig) -> Path | None:
    """Of the model that is named; where a script answers, its tokenizer and template are enough."""
    path = Path(config.actor.path).expanduser()
    if not config.actor.path:
        return None
    scripted = parse_backend(config.rollout.backend).name == "scripted"
    return path.resolve() if scripted and path.is_dir() else resolve(config.actor.path, progress=_say)


async def _environment(command: Command, config: RunConfig, url: str) -> dict[str, str]:
    """Where an agent looks for its base URL and key. Raises ArealError if the session cannot be started."""
    agent = config.rollout.agent
    key = agent.internal_token or ""
    if command.session is not None:
        async with JsonClient(url, bearer=agent.admin_api_key) as client:
            key = (await client.post("/rl/start_session", {"task_id": command.session}))["api_key"]
    return {
        **loopback_past_proxies(),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",  # what langchain, litellm and aider read
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "AREAL_BASE_URL": url,
        "AREAL_API_KEY": key,
        "AREAL_ADMIN_API_KEY": agent.admin_api_key,
    }


async def _until_idle(workers: Sequence[JsonClient]) -> None:
    """The agent is gone, so its calls end within a second and are recorded."""
    deadline = time.monotonic() + IDLE_S
    while time.monotonic() < deadline:
        if not any([(await worker.get("/health"))["calls"] for worker in workers]):
            return
        await asyncio.sleep(0.05)


async def _requests(url: str) -> Requests:
    """From the gateway's own counters; our own calls are left out."""
    async with open_session() as http, http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    counted = {(route, int(status)): int(float(count)) for route, status, count in _ANSWERED.findall(text)}
    return Requests({key: count for key, count in counted.items() if key not in _OURS})


def parse(argv: Sequence[str]) -> Command:
    """Raises ConfigError with all problems; `--help` and wrong flags end the process as argparse does (0 and 2)."""
    parser = argparse.ArgumentParser(
        prog="areal doctor",
        description="Run an agent once and tell what training would make of it.",
        epilog="Exit codes: 0 trainable, 1 tokens would be lost or the agent failed, 2 a wrong command line or configuration, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--agent", required=True, metavar="CMD", help="the command line that runs the agent once")
    parser.add_argument("--script", metavar="FILE", help="answers from a script instead of a model (docs/scripted.md)")
    parser.add_argument("--config", metavar="FILE", help="the run's configuration; without one the defaults hold")
    parser.add_argument("--session", metavar="TASK", help="start a session of this task and give the agent its key")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"seconds; default {TIMEOUT_S:g}")
    parser.add_argument("--port", type=int, default=0, help="of the gateway; default 0, a free one")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="keep the run folder there, for `areal dashboard --run DIR`"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides, as in actor.path=FOLDER")
    flags, rest = parser.parse_known_args(list(argv))
    strange = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if strange:
        parser.error(f"unknown flag {strange[0]}; keys of the configuration are written without dashes: key.sub=value")
    if not flags.timeout > 0:
        parser.error(f"--timeout is {flags.timeout:g}; give the agent some seconds")
    if not flags.agent.strip():
        parser.error("--agent is empty; write the command line that runs the agent once")
    output_dir = Path(flags.output_dir).absolute() if flags.output_dir else None
    if output_dir is not None and has_store(output_dir):
        raise ConfigError(f"{output_dir} holds a run already; choose a new --output-dir")
    resolved = resolve_config(Path(flags.config) if flags.config else None, [*flags.overrides, *rest])
    for note in resolved.notes:
        _say(f"note: {redact(note)}")
    return Command(
        config=resolved.config,
        agent=flags.agent,
        script=flags.script,
        session=flags.session,
        port=flags.port,
        timeout_s=flags.timeout,
        json=flags.json,
        output_dir=output_dir,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`areal doctor`. See the module for the exit codes."""
    try:
        command = parse(sys.argv[1:] if argv is None else list(argv))
        with ExitStack() as stack:
            root = command.output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-doctor-")))
            report = asyncio.run(_interruptible(examine(command, root)))
    except ArealError as error:
        for line in redact(str(error)).splitlines():
            print(line if line.startswith("error: ") else f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    sys.stdout.write(as_json(report) if command.json else as_text(report))
    return 0 if report.trainable else 1


async def _interruptible(work: Coroutine[Any, Any, Report]) -> Report:
    """SIGTERM ends it as Ctrl-C does: the agent's tree and every process are gone by the end."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _say(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr, flush=True)


def _show(line: str) -> None:
    print(f"agent | {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
