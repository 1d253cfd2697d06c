"""What generates and who may start (`rollout`, `gconfig`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.config.agents import ProcessConfig
from areal.config.engine import Dtype
from areal.config.reward import RewardConfig
from areal.config.section import Section

AgentMode = Literal["inline", "subproc", "online"]
StylesOfExport = Literal["individual", "concat"]
StalePolicy = Literal["auto", "drop", "mask", "wait"]
SamplingOwner = Literal["client", "policy"]
RewardKey = Literal["session", "admin"]
ToolCallParser = Literal[
    "qwen", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "glm", "kimi", "json", "none"
]
ReasoningParser = Literal["qwen3", "deepseek_r1", "mistral", "kimi", "none"]
Framework = Literal["openclaw", "langchain", "claude_code"]
RewardSource = Literal["client", "reward_model", "judge_model", "function"]


class AgentConfig(Section):
    mode: AgentMode = "inline"
    """inline: agents run in the rollout worker; subproc: in a process pool; online: they come over HTTP, or are programs that the service
    starts (`command`, `framework`)."""
    path: str | None = None
    """The agent that the service runs, as `module:attribute`: an object with `run(task, *, base_url, api_key)`; a coroutine function, or with
    mode subproc a plain one. With framework langchain also a function that makes the agent of a chat model (docs/agents.md)."""
    command: list[str] | str | None = None
    """In mode online: the command line of an agent that the service starts for each try of a task, with placeholders such as {prompt};
    base URL and key stand in its environment (docs/agents.md). null = the framework's own, or agents come over HTTP by themselves."""
    model_name: str = "policy"
    """The model that agents which the service starts ask for; any name is the policy's."""
    max_turns: int = Field(32, ge=1)
    """Most model calls of one session that opened by itself, under the internal token; the last one ends it. Drivers of frameworks that
    have such a limit (langchain, claude_code) and the placeholder {max_turns} pass it on; to openclaw, which has none, later calls are
    refused (403)."""
    framework: Framework | None = None
    """Which agent it is; implies online mode. With tasks (train_dataset.path) the service starts it for each try, as its driver knows how;
    without, it is waited for. All of them use the same gateway."""
    reward_source: RewardSource = "client"
    """Who rewards: the client by /rl/set_reward; or the run itself, once a session has ended, by a model of the upstream channel or by a
    Python function (rollout.reward, docs/rewards.md). Then no agent's key may reward."""
    admin_api_key: str = Field("areal-admin-key", json_schema_extra={"secret": True})
    """Opens start_session and export. The default works on loopback only."""
    internal_token: str | None = Field(None, json_schema_extra={"secret": True})
    """A key for agents that are configured once and never call start_session: their sessions open by themselves.
    `gateway-internal-token` works on loopback only."""
    gateway_host: str | None = None
    """Address the gateway binds; null = loopback under the local scheduler, all interfaces elsewhere."""
    gateway_port: int = Field(8090, ge=0, le=65535)
    """0 = a free one, printed at start."""
    refresh_timeout_seconds: float = Field(120.0, gt=0)
    """How long a refresh, or a call that opens a session by itself, waits for a free slot before it answers 429."""
    session_timeout_seconds: float = Field(3600.0, gt=0)
    """A session idle for this long is ended as expired; a request in flight is not idle."""
    reward_grace_seconds: float = Field(0.0, ge=0)
    """How long an ended session still takes rewards, for late verifiers."""
    reward_key: RewardKey = "session"
    """Which key may call set_reward. admin, and a `model_key` for the agent, keep a policy with a shell from rewarding itself."""
    reward_clip: float | None = Field(None, gt=0)
    """A reward is trained as at most this in size; the raw one stays recorded, and each that was clipped is counted. null = as set."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """R_i = r_i + turn_discount * R_next along a conversation."""
    export_style: StylesOfExport = "individual"
    """Training rows: one per interaction, or one per conversation branch."""
    sampling: SamplingOwner = "client"
    """Whose temperature, top_p, top_k and seed hold where a client names some; its max_tokens and stop texts always hold."""
    chat_template: str | None = None
    """A Jinja file that writes the prompts in place of the model's own chat template, for example one that lists tools;
    null = the model's own. Checkpoints keep the model's own."""
    tool_call_parser: ToolCallParser = "qwen"
    """How the model writes tool calls. qwen: as its chat template shows, else as Qwen does (the same as hermes)."""
    reasoning_parser: ReasoningParser = "qwen3"
    """How the model marks its reasoning. qwen3: as its chat template shows, else <think>; deepseek_r1: it always thinks first."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body, also after decompression."""
    process: ProcessConfig = ProcessConfig()


class NativeConfig(Section):
    dtype: Dtype = "float32"
    """Of the served weights; the same as actor.dtype unless you want a faster, less exact sampler."""
    max_batch: int = Field(64, ge=1)
    """Most sequences decoded together."""
    max_context: int = Field(2048, ge=64)
    """Longest prompt + output, in tokens; also bounded by the model and by kv_tokens."""
    kv_tokens: int = Field(65536, ge=256)
    """Tokens the KV cache holds over all sequences."""
    prefill_chunk: int = Field(512, ge=16)
    """Prompt tokens computed per engine step, so that a long prompt does not stop the others."""
    prefix_reuse: bool = True
    """Keep the KV of finished turns and shared prompts for reuse under the same weights."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0 = half of the cores in an asynchronous run, all of them in a synchronous one."""
    deterministic: bool = False
    """Fix the batch composition so that a run repeats bit for bit (slower, without prefix reuse; used by tests)."""


class ScriptedConfig(Section):
    path: str = ""
    """JSONL of fixed generations, see docs/scripted.md."""


class RolloutConfig(Section):
    backend: str = "native:d1"
    """What generates, and how many servers: `native:d<N>`, `scripted:d<N>`, `sglang:d<N>`, `vllm:d<N>`."""
    workers: int = Field(1, ge=1)
    """Rollout worker processes; each serves sessions and runs agents."""
    max_concurrent_rollouts: int = Field(64, ge=1)
    """Most groups running at once."""
    queue_size: int | None = Field(None, ge=1)
    """Most finished groups waiting to be trained; null = as many as the lag allows."""
    max_head_offpolicyness: int = Field(2, ge=0)
    """Most versions a trained token may be behind the weights being trained. 0 = synchronous."""
    stale_tokens: StalePolicy = "auto"
    """What happens to tokens older than that: drop the session, or mask the tokens; wait = a step waits for running groups that
    would be too old after it, and nothing is lost (docs/staleness.md); auto = mask online, drop elsewhere."""
    stale_wait_seconds: float = Field(600.0, gt=0)
    """Longest wait of one step for running groups, under `stale_tokens: wait` or for a task that has lost work as stale; then the step
    goes on and drops or masks what is too old."""
    group_timeout_seconds: float = Field(3600.0, gt=0)
    """A group not complete by then is trained with its survivors (>= 2), or dropped."""
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    native: NativeConfig = NativeConfig()
    scripted: ScriptedConfig = ScriptedConfig()


class GenerationConfig(Section):
    n_samples: int = Field(1, ge=1)
    """Sessions per group: how many times each task id is tried and compared."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Where the client names none. At 0 (greedy) tokens are recorded and never trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that hold this much probability; 1 = all, and best for training."""
    top_k: int = Field(0, ge=0)
    """0 = off."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Output limit where the client names none; null = to the end of the context."""
