"""Both texts' files resolve to what they mean; the second set of names works in files and on the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal.base.errors import ConfigError
from areal.base.guide import situation
from areal.base.redact import redact
from areal.config.aliases import ALIASES
from areal.config.command_line import load_command_line, parse
from areal.config.keys import keys_of, paths_of
from areal.config.load import resolve
from areal.config.run import RunConfig
from areal.config.show import masked_tree, masked_yaml, secretless_tree
from areal.config.startable import refuse_unstartable, why_not
from areal.config.supported import REFUSALS, reasons

FIXTURES = Path(__file__).parent / "fixtures"
SECRET = "sk-upstream-0123456789-tail"


@pytest.fixture
def in_fixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory as the second text has it: configs/ with both of its files."""
    (tmp_path / "configs").mkdir()
    for name in ("agent_async_train.yaml", "taotoken_router.yaml"):
        (tmp_path / "configs" / name).write_text((FIXTURES / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAOTOKEN_API_KEY", SECRET)
    return tmp_path


def second(*overrides: str) -> RunConfig:
    return resolve(Path("configs/agent_async_train.yaml"), overrides).config


def test_async_off_is_lag_0_and_nothing_else() -> None:
    """So that what holds at lag 0 (tests/e2e/test_exactness.py: bit-equal to a sequential loop) holds for it."""
    off, zero = (
        resolve(Path("configs/tiny.yaml"), [word]).config
        for word in ("async.enabled=false", "rollout.max_head_offpolicyness=0")
    )
    assert off == zero
    assert off.rollout.max_head_offpolicyness == 0


def test_the_first_text_resolves_as_printed() -> None:
    agent = resolve(FIXTURES / "online.yaml").config.rollout.agent
    assert agent.mode == "online"
    assert agent.admin_api_key == "my-secret-admin-key"
    assert (agent.session_timeout_seconds, agent.turn_discount, agent.export_style) == (3600, 1.0, "individual")


def test_the_second_text_resolves_to_what_the_contract_says(in_fixtures: Path) -> None:
    config = second()
    assert config.actor.backend == "archon:d4t2p1c1e1"
    assert (config.actor.optimizer.lr, config.actor.mini_batch_size, config.total_train_steps) == (1e-6, 8, 2000)
    assert (config.train_dataset.batch_size, config.train_dataset.max_batch_size) == (32, 64)
    rollout = config.rollout
    assert (rollout.workers, rollout.max_head_offpolicyness, rollout.queue_size) == (8, 2, 256)
    agent = rollout.agent
    assert (agent.framework, agent.mode, agent.max_turns, agent.reward_source) == (
        "openclaw",
        "online",
        10,
        "reward_model",
    )
    log = config.stats_logger
    assert (log.log_dir, log.log_interval, config.saver.freq_steps) == ("./logs/areal_async", 10, 200)
    assert config.api_gateway is not None
    assert (config.api_gateway.api_key, config.api_gateway.timeout, config.api_gateway.max_retries) == (SECRET, 120, 3)
    assert config.model_routing is not None
    assert config.model_routing.judge_model is not None
    assert config.model_routing.judge_model.max_tokens == 256
    assert config.actor.path == "your-policy-model-id"
    assert (config.gconfig.temperature, config.gconfig.max_new_tokens) == (0.7, 2048)


def test_the_router_file_alone_is_a_configuration(in_fixtures: Path) -> None:
    config = resolve(Path("configs/taotoken_router.yaml")).config
    assert config.api_gateway is not None
    assert config.api_gateway.base_url == "https://taotoken.net/api"
    assert config.actor.path == "your-policy-model-id"


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["async.enabled=false"], "rollout.max_head_offpolicyness", 0),
        (["async.staleness_threshold=5"], "rollout.max_head_offpolicyness", 5),
        (["rollout.max_head_offpolicyness=7"], "rollout.max_head_offpolicyness", 7),
        (["train.parallelism.tp=1"], "actor.backend", "archon:d4t1p1c1e1"),
        (["train.parallelism.dp=2"], "actor.backend", "archon:d4t2p1c1e1"),  # train_workers wins
        (["async.train_workers=2"], "actor.backend", "archon:d2t2p1c1e1"),
        (["actor.backend=fsdp:d1"], "actor.backend", "fsdp:d1"),
        (["gconfig.n_samples=8"], "train_dataset.batch_size", 4),
        (["gconfig.n_samples=8"], "train_dataset.max_batch_size", 8),
        (["train_dataset.batch_size=3"], "train_dataset.batch_size", 3),
        (["actor.path=smollm2-135m"], "actor.path", "smollm2-135m"),
        (["gconfig.temperature=1"], "gconfig.temperature", 1.0),
        (["model_routing.policy_model.upstream=true"], "actor.path", ""),
        (["agent.framework=null"], "rollout.agent.mode", "inline"),
        (["train.global_batch_size=32"], "train_dataset.max_batch_size", None),
        (["rollout.agent.mode=subproc"], "rollout.agent.mode", "subproc"),
    ],
)
def test_overrides_work_in_either_set_of_names(
    in_fixtures: Path, overrides: list[str], path: str, value: object
) -> None:
    found: object = second(*overrides)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_half_of_global_starts_a_step_where_no_trigger_is_named() -> None:
    config = resolve(None, ["train.global_batch_size=64"]).config
    assert (config.train_dataset.batch_size, config.train_dataset.max_batch_size) == (32, 64)
    assert resolve(None, ["train.engine=fsdp", "train.parallelism.dp=4"]).config.actor.backend == "fsdp:d4"
    both = ["train.engine=fsdp", "train.parallelism.dp=2", "train.parallelism.tp=2"]
    assert resolve(None, both).config.actor.backend == "fsdp:d2t2"


def test_notes_say_what_wins_and_why_a_run_does_not_overlap(in_fixtures: Path) -> None:
    path = Path("configs/agent_async_train.yaml")
    [wins] = resolve(path, ["train.parallelism.dp=2"]).notes
    assert "async.train_workers=4 wins over train.parallelism.dp=2" in wins
    [alternate] = resolve(path, ["async.staleness_threshold=0"]).notes
    assert situation("async-lag-0").said_in(alternate)
    [turns] = resolve(path, ["async.enabled=false"]).notes
    assert situation("async-off").said_in(turns)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["async.train_workers=0"], "async.train_workers: 0 must be a whole number of at least 1"),
        (["async.rollout_workers=0"], "async.rollout_workers (rollout.workers): '0' must be at least 1"),
        (["async.trigger_batch_size=65"], "65 trajectories start a step"),
        (["train.parallelism.tp=two"], "train.parallelism.tp: two must be a whole number"),
        (["agent.framework=autogen"], "one of openclaw, langchain, claude_code or null"),
        (["train.engine=megatron"], "'megatron' is unknown"),
        (["train.engine=fsdp", "train.parallelism.pp=2"], "fsdp knows d, t, e only, not p"),
        (["train.max_steps=5", "total_train_steps=6"], "contradicts train.max_steps"),
        (["agent.gateway_config=nope.yaml"], "nope.yaml does not exist"),
        (["agent.gateway_config=configs/agent_async_train.yaml"], "holds api_gateway and model_routing only"),
    ],
)
def test_wrong_values_in_the_second_names_say_the_name_that_was_written(
    in_fixtures: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        second(*overrides)
    assert sentence in str(wrong.value)


def test_both_sets_of_names_may_agree() -> None:
    assert resolve(None, ["train.max_steps=5", "total_train_steps=5"]).config.total_train_steps == 5


def test_every_alias_leads_to_a_key_that_exists() -> None:
    for alias in ALIASES:
        assert alias.target in keys_of(RunConfig), alias.target
        assert alias.meaning
        for name in alias.names:
            assert name.split(".")[0] in ("train", "async", "agent", "logging") or name in keys_of(RunConfig)


def test_every_refusal_names_a_key_and_its_remedy() -> None:
    for refusal in REFUSALS:
        assert refusal.path in paths_of(RunConfig), refusal.path
        assert ";" in refusal.reason


def test_what_is_not_built_is_refused_with_every_reason_and_placeholders_too(in_fixtures: Path) -> None:
    found = reasons(second("scheduler.type=ray", "rollout.backend=vllm:d2"))
    text = "\n".join(found)
    for part in (
        "scheduler.type=ray: online mode needs",
        "vLLM",
    ):
        assert part in text
    assert "model_routing.reward_model.model_id is still the placeholder" in text
    with pytest.raises(ConfigError, match="placeholder"):
        refuse_unstartable(resolve(None, ["rollout.agent.internal_token=sk-你的key"]).config)
    assert reasons(RunConfig()) == []


ONLINE = ("rollout.agent.mode=online", "actor.path=smollm2-135m")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), None),
        (("rollout.agent.gateway_host=0.0.0.0", "rollout.agent.admin_api_key=k-0123456789"), "works on loopback only"),
        (("rollout.agent.internal_token=areal-admin-key",), "is the admin key, which no agent may hold"),
        (("rollout.agent.internal_token=null",), "only sessions that open by themselves have a last turn"),
    ],
)
def test_the_agent_file_of_this_repository_starts_and_its_token_stays_on_loopback(
    overrides: tuple[str, ...], says: str | None
) -> None:
    path = Path(__file__).resolve().parents[2] / "agent_config.py"
    config = resolve(None, ["actor.path=smollm2-135m", *overrides], agent_config=path).config
    assert (config.rollout.agent.gateway_port, config.rollout.agent.max_turns) == (9000, 10)
    if says is None:
        refuse_unstartable(config)
        return
    with pytest.raises(ConfigError, match=says) as refused:
        refuse_unstartable(config)
    assert "gateway-internal-token" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("actor.path=m",), "there is no agent or no tasks"),
        (("rollout.agent.mode=online",), "actor.path is empty"),
        ((*ONLINE, "train_dataset.path=t.jsonl"), "train_dataset.path=t.jsonl: agents that come over HTTP"),
        ((*ONLINE, "evaluator.path=t.jsonl"), "evaluator.path needs an agent"),
        ((*ONLINE, "evaluator.agent=a:b"), "evaluator.agent=a:b: there are no tasks for it"),
        ((*ONLINE, "rollout.backend=scripted:d1"), "name its file in rollout.scripted.path"),
        ((*ONLINE, "rollout.scripted.path=s.jsonl"), "rollout.backend=native:d1 plays no script"),
        ((*ONLINE, "evaluator.agent=a:b", "evaluator.path=no.jsonl"), "evaluator.path=no.jsonl is no file"),
        (
            (*ONLINE, "evaluator.agent=a.b", "evaluator.path=t.jsonl"),
            "evaluator.agent=a.b: write it as module:attribute",
        ),
        (("actor.path=m", "rollout.agent.path=a:", "train_dataset.path=t.jsonl"), "rollout.agent.path=a:: write it as"),
        (
            (*ONLINE, "rollout.agent.reward_source=function", "rollout.reward.path=a.py"),
            "rollout.reward.path=a.py: write it as module:attribute",
        ),
        (
            ("actor.path=m", "rollout.agent.path=a:b", "train_dataset.path=no.jsonl"),
            "train_dataset.path=no.jsonl is no file",
        ),
        (
            ("actor.path=m", *ONLINE, "rollout.backend=scripted:d1", "rollout.scripted.path=no.jsonl"),
            "path=no.jsonl is no file",
        ),
        ((*ONLINE, "rollout.agent.chat_template=no.jinja"), "rollout.agent.chat_template=no.jinja is no file"),
        ((*ONLINE, "rollout.queue_size=7"), "rollout.queue_size=7 never holds the 8 groups"),
        (
            (*ONLINE, "train_dataset.max_batch_size=7"),
            "max_batch_size=7: a step begins with train_dataset.batch_size=8",
        ),
        ((*ONLINE, "gconfig.n_samples=4", "rollout.agent.internal_token=tok-0815"), "is a task of its own"),
        (
            (*ONLINE, "actor.context_parallel=ulysses"),
            "actor.context_parallel=ulysses: no archon: net has c; take it out",
        ),
        (
            (*ONLINE, "actor.sequence_parallel=false", "actor.backend=fsdp:t2"),
            "actor.sequence_parallel=false: no archon: net has t; take it out",
        ),
        (
            (*ONLINE, "actor.sequence_parallel=false"),
            "actor.sequence_parallel=false: no archon: net has t; take it out",
        ),
        (
            (*ONLINE, "actor.backend=fsdp:d4", "actor.replicas=3"),
            "actor.replicas=3 must divide the d4 of fsdp:d4; replicas of 1, 2 or 4 fits",
        ),
        (
            (*ONLINE, "actor.kl_ctl=0.1", "ref.backend=fsdp:d2", "ref.replicas=4"),
            "ref.replicas=4 must divide the d2 of fsdp:d2; replicas of 1 or 2 fits",
        ),
    ],
)
def test_what_is_missing_or_said_in_vain_is_one_line_also_under_dry_run(
    overrides: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").touch()
    Path("s.jsonl").touch()
    config = resolve(None, overrides).config
    [reason] = why_not(config)
    assert says in reason
    with pytest.raises(ConfigError, match=re.escape(says)):
        refuse_unstartable(config)
    assert f"would not start: {reason}" in run("--dry-run", *overrides).stderr


def test_what_is_whole_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").touch()
    assert why_not(resolve(None, ONLINE).config) == []
    assert why_not(resolve(None, [*ONLINE, "evaluator.path=t.jsonl", "rollout.agent.path=a:b"]).config) == []
    cut = ["actor.backend=archon:d4t2", "actor.replicas=2", "actor.sequence_parallel=false"]
    assert why_not(resolve(None, [*ONLINE, *cut]).config) == []


def test_T109_the_default_admin_key_is_refused_beyond_loopback() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "node-7"):
        [reason] = reasons(resolve(None, [f"rollout.agent.gateway_host={host}"]).config)
        assert "default admin key works on loopback only" in reason
        own = resolve(None, [f"rollout.agent.gateway_host={host}", "rollout.agent.admin_api_key=my-own-0123456789"])
        assert reasons(own.config) == []
    for host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        assert reasons(resolve(None, [f"rollout.agent.gateway_host={host}"]).config) == []


def test_the_epochs_of_the_first_text_need_as_many_steps() -> None:
    assert reasons(resolve(None, ["total_train_epochs=10", "total_train_steps=100"]).config) == []
    assert (
        "an epoch has at least one step; lower the second too"
        in reasons(resolve(None, ["total_train_epochs=101"]).config)[0]
    )


def test_T108_the_shown_tree_masks_every_secret(in_fixtures: Path) -> None:
    config = second("rollout.agent.admin_api_key=admin-0123456789", "rollout.agent.internal_token=tok-0123456789")
    text = masked_yaml(config)
    for secret in (SECRET, "admin-0123456789", "tok-0123456789"):
        assert secret not in text
        assert secret[-5:] not in text
        assert secret not in redact(f"in a sentence: {secret}.")
    assert masked_tree(config)["api_gateway"]["api_key"] == "sk-…tail"
    assert yaml.safe_load(text)["rollout"]["workers"] == 8
    assert config.rollout.agent.admin_api_key == "admin-0123456789"  # the config itself is whole


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from areal.config.command_line import load_command_line as f; f(sys.argv[1:]); print('start')"
    )
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


def test_dry_run_prints_the_tree_and_what_would_not_start(in_fixtures: Path) -> None:
    done = run("--config", "configs/agent_async_train.yaml", "--dry-run", "async.enabled=false")
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["rollout"]["max_head_offpolicyness"] == 0
    assert "would not start: model_routing.reward_model.model_id is still the placeholder" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_a_wrong_configuration_is_a_line_per_problem_and_exit_2(in_fixtures: Path) -> None:
    done = run("--config", "configs/agent_async_train.yaml", "seed=x", "async.enabld=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    assert "Traceback" not in done.stderr
    assert run("--config", "nope.yaml").returncode == 2
    assert run("--rollout.agent.admin_api_key=hunter2hunter2").returncode == 2
    assert "hunter2" not in run("--rollout.agent.admin_api_key=hunter2hunter2").stderr


def test_flags_and_overrides_stand_in_any_order(in_fixtures: Path) -> None:
    words = [
        "seed=3",
        "--config",
        "configs/agent_async_train.yaml",
        "trial_name=a b",
        "--output-dir",
        "out",
        "gconfig.top_k=5",
    ]
    command = parse(words)
    assert (command.config.seed, command.config.trial_name, command.config.gconfig.top_k) == (3, "a b", 5)
    assert command.output_dir == "out"
    assert load_command_line(["seed=4"]).seed == 4


AGENT = 'AGENT_CONFIG = {"model_base_url": "%s", "model_name": "default", "api_key": "%s", "max_turns": 10}\n'


def test_the_agent_file_gives_token_turns_port_and_online_mode(tmp_path: Path) -> None:
    path = tmp_path / "agent_config.py"
    path.write_text(AGENT % ("http://localhost:9000/gateway/v1", "gateway-internal-token"))
    resolved = resolve(None, [], agent_config=path)
    agent = resolved.config.rollout.agent
    assert (agent.mode, agent.internal_token, agent.max_turns) == ("online", "gateway-internal-token", 10)
    assert (agent.gateway_port, resolved.notes) == (9000, ())
    assert resolve(None, ["rollout.agent.max_turns=3"], agent_config=path).config.rollout.agent.max_turns == 3


def test_the_port_that_the_text_prints_is_put_right_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "agent_config.py"
    path.write_text(AGENT % ("http://localhost:8080/v1", "k-0123456789abc"))
    resolved = resolve(None, [], agent_config=path)
    assert resolved.config.rollout.agent.gateway_port == 9000
    assert "http://localhost:9000/gateway/v1" in resolved.notes[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n", "defines no AGENT_CONFIG"),
        ("def :\n", "cannot be loaded: SyntaxError: invalid syntax (agent_config.py, line 1); correct it there"),
        ("import no_such_module\n", "No module named 'no_such_module' (agent_config.py, line 1)"),
        ("import os\nTOKEN = os.environ['NOT_SET']\n", "KeyError: 'NOT_SET' (agent_config.py, line 2)"),
        ("class Own(Exception): ...\nraise Own\n", "cannot be loaded: Own (agent_config.py, line 2)"),
        ('AGENT_CONFIG = {"modle": 1}\n', "unknown entries modle"),
        ('AGENT_CONFIG = {"max_turns": 0}\n', "must be at least 1"),
        (AGENT % ("localhost:9000", "k"), "is no URL"),
        (AGENT % ("http://gpu-7:9000/v1", "k"), "names host gpu-7"),
    ],
)
def test_a_wrong_agent_file_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "agent_config.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        resolve(None, [], agent_config=path)
    assert sentence in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_a_configuration_is_read_back_without_its_secrets() -> None:
    overrides = ["store.url=postgresql://me:hush@host/db", "rollout.agent.admin_api_key=hush-hush", "actor.path=x"]
    config = resolve(None, overrides).config
    tree = secretless_tree(config)
    assert "hush" not in str(tree)
    again = RunConfig.model_validate(tree)
    assert again.store.url is None
    assert again.model_dump(exclude={"store", "rollout"}) == config.model_dump(exclude={"store", "rollout"})


def test_a_configuration_with_a_channel_can_be_read_again_without_its_secrets(in_fixtures: Path) -> None:
    """`areal replay` does, and refused every run with an upstream channel: its key may not be absent."""
    config = resolve(Path("configs/agent_async_train.yaml"), ["rollout.agent.internal_token=t-0815-t-0815"]).config
    tree = secretless_tree(config)
    assert tree["rollout"]["agent"]["internal_token"] is None
    assert SECRET not in str(tree)
    again = type(config).model_validate(tree)
    assert again.api_gateway is not None
    assert again.train_dataset == config.train_dataset
