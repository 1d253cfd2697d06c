"""The scripted inference server: `python -m areal.inference.scripted.server --spec FILE`.

The spec's own keys: `path` (the script), `host` (127.0.0.1), `port` (0 = a free one), `version` (0, the label of the first
weights), `ping_s` (15, seconds between pings of a stream that waits). Reports {"url", "model", "version"} when ready. GET
/calls, with the run token, tells what was asked and how it ended. No torch.
"""

from __future__ import annotations

from areal.base.errors import ConfigError
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.inference.app import HOLD_S, PING_S, WireApp
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script
from areal.web.address import bind
from areal.web.serve import serve

JOB_KEYS = frozenset({"path", "host", "port", "version", "ping_s"})


async def main(spec: ChildSpec) -> None:
    """Serve until SIGTERM. Raises ConfigError for a wrong spec or script."""
    unknown = sorted(set(spec.job) - JOB_KEYS)
    if unknown:
        raise ConfigError(
            f"the scripted server knows no {', '.join(unknown)}; its keys are {', '.join(sorted(JOB_KEYS))}"
        )
    path = spec.job.get("path", "")
    if not path:
        raise ConfigError(
            "rollout.backend is scripted, so rollout.scripted.path must name a script; see docs/scripted.md"
        )
    version = int(spec.job.get("version", 0))
    engine = ScriptedEngine(read_script(path), version=version)
    ping_s = float(spec.job.get("ping_s", PING_S))
    app = WireApp(engine, spec.run_token, extra={"/calls": engine.calls}, hold_s=min(HOLD_S, ping_s), ping_s=ping_s)
    sock = bind(spec.job.get("host", "127.0.0.1"), int(spec.job.get("port", 0)), setting="the scripted server's port")
    await serve(app, sock, ready=lambda url: report_ready(spec, url=url, model="scripted", version=version), grace_s=2)


if __name__ == "__main__":
    run_child(main)
