"""How each command of the documents is run by a test. One table: what none of its lines knows fails tests/docs/test_blocks.py.

dry:       a configuration that starts: it is resolved, and nothing keeps it from running
launch:    the script, which tests/e2e/test_second_text.py runs; here, what it is given is a configuration that starts
tool:      one that only computes, run as it is
run:       one that looks at a finished run, run on that of tests/e2e/test_tiny_run.py
service:   one that speaks to a service: its whole block is run against one that plays a script
test:      run by another test, which is named
not run:   nothing can run it here; the reason is named
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

How = Literal["dry", "launch", "tool", "run", "service", "test", "not run"]


@dataclass(frozen=True, slots=True)
class Way:
    """pattern: of a whole command. by: the test (`tests/FILE.py::NAME`), or the reason."""

    pattern: str
    how: How
    by: str = ""


_INDEX = "needs a package index; tests/layout/test_install.py installs areal itself"
WAYS: tuple[Way, ...] = (
    Way(r"areal train .*claude_code/.*", "test", "tests/examples/test_claude_code.py::test_the_run_starts_it"),
    Way(r"(areal train|python3? -m areal\.train|python3? examples/openclaw/train\.py) --config .*", "dry"),
    Way(r"areal plan .*", "tool"),
    Way(r"areal replay .*", "test", "tests/e2e/test_tiny_run.py::test_every_asynchronous_step_is_made_again"),
    Way(r"areal export .*", "test", "tests/tools/test_export.py::test_"),
    Way(r"areal (status|plot|compare) .*", "run"),
    Way(r"python -m areal\.tools\.plot_metrics .*|(tail -f|grep throughput) \S+/train\.log \| .*", "run"),
    Way(r"grep taotoken .*", "test", "tests/e2e/test_second_text.py::test_4_4_the_routers_log"),
    Way(r"python scripts/check_channel\.py", "test", "tests/e2e/test_second_text.py::test_2_5_the_channel"),
    Way(r"(\w+=\S+ )?bash scripts/launch_async\.sh.*", "launch"),
    Way(r"export TAOTOKEN_API_KEY=.*", "not run", "the key of a channel is its owner's"),
    Way(r"areal doctor --agent \"python agent.py\"", "test", "tests/tools/test_doctor_findings.py::test_"),
    Way(
        r"python3 examples/openclaw/demo_lifecycle\.py .*",
        "test",
        "tests/e2e/test_first_text.py::test_faq_openclaw_keeps_one_key",
    ),
    Way(r"python3 examples/openclaw/(start_session|set_reward)\.py .*", "service"),
    Way(r"(\w+=\S+ )?bash scripts/sample_batch\.sh.*", "service"),
    Way(r"(URL|KEY)=.*|curl .*", "service"),
    Way(r"python -m examples\.play .*math_agent.*", "test", "tests/e2e/test_demo.py::test_"),
    Way(r"python -m examples\.play .*langchain.*", "test", "tests/examples/test_installed_agents.py::test_"),
    Way(r"python examples/own_agent/agent\.py .*", "test", "tests/examples/test_own_agent.py::test_"),
    Way(r"openclaw agent exec .*", "test", "tests/examples/test_installed_agents.py::test_"),
    Way(r"python -c \"import areal; print\(areal\.__version__\)\"", "tool"),
    Way(r"make demo", "test", "tests/e2e/test_demo.py::test_"),
    Way(r"make test", "not run", "it is what runs this test"),
    Way(r"make install|\. \.venv/bin/activate|(pip|npm) install .*", "not run", _INDEX),
)
# Python programs: the test that runs the block of this page.
PROGRAMS = {
    "README.md": "tests/clients/test_documented_programs.py::test_a_program_that_plays_a_session",
    "docs/agents.md": "tests/clients/test_documented_agents.py::test_",
    "docs/http.md": "tests/clients/test_documented_programs.py::test_a_program_that_plays_a_session",
    "docs/quickstart.md": "tests/clients/test_documented_programs.py::test_a_program_that_speaks_three_protocols",
    "docs/tutorial_online.md": "tests/clients/test_documented_programs.py::test_a_program_that_asks_under_a_key",
    "docs/doctor.md": "tests/tools/test_doctor_findings.py::test_",
    "docs/rewards.md": "tests/clients/test_documented_programs.py::test_the_reward_function",
    "docs/scripted.md": "tests/inference/test_scripted_docs.py::test_",
}


def way_of(command: str) -> Way | None:
    """The first line of the table that knows the command."""
    return next((way for way in WAYS if re.fullmatch(way.pattern, command, re.DOTALL)), None)
