"""Loading: types decided by the key, overrides, environment, references, and errors a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import ConfigError
from areal.base.redact import redact
from areal.config.keys import keys_of, paths_of
from areal.config.load import load_config, resolve
from areal.config.problems import Problems
from areal.config.run import RunConfig
from areal.config.section import Section
from areal.config.settings import FILE, flatten, flatten_override, merge, resolve_environment
from areal.config.tree import build
from areal.config.yaml_text import load_yaml


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return resolve(path, overrides).config


def problems_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as wrong:
        load(tmp_path, text, *overrides)
    return str(wrong.value).splitlines()


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "1E-6", "1.e-6", "5e5", "1.0e6", "3", ".5", "+1e-3"])
def test_T089_scientific_notation_is_a_number_in_files_and_on_the_command_line(tmp_path: Path, written: str) -> None:
    assert load(tmp_path, f"train: {{learning_rate: {written}}}").actor.optimizer.lr == float(written)
    assert load(tmp_path, "", f"train.learning_rate={written}").actor.optimizer.lr == float(written)
    assert load(tmp_path, "", f"actor.optimizer.lr={written}").actor.optimizer.lr == float(written)


def test_T089_a_word_for_a_number_names_path_value_and_type(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "train: {learning_rate: fast}") == [
        "train.learning_rate (actor.optimizer.lr): 'fast' must be a number"
    ]
    assert problems_of(tmp_path, "rollout: {workers: 1.5}") == ["rollout.workers: '1.5' must be a whole number"]
    assert problems_of(tmp_path, "rollout: {workers: 0}") == ["rollout.workers: '0' must be at least 1"]
    assert problems_of(tmp_path, "rollout: {workers: true}") == ["rollout.workers: 'true' must be a whole number"]
    assert problems_of(tmp_path, "actor: {optimizer: {lr: .inf}}")[0].startswith("actor.optimizer.lr: 'inf'")


@pytest.mark.parametrize("text", ["010", "12:30:45", "no", "1e3", "2026-11-29", "true", "0x1F", "1_000", "~x"])
def test_T089_text_keys_keep_the_text_that_was_written(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"trial_name: {text}").trial_name == text
    assert load(tmp_path, "", f"trial_name={text}").trial_name == text


def test_numbers_follow_yaml_1_2_and_booleans_are_true_or_false(tmp_path: Path) -> None:
    assert load(tmp_path, "seed: 010").seed == 10
    assert load(tmp_path, "total_train_steps: 5e3").total_train_steps == 5000
    assert load(tmp_path, "train_dataset: {shuffle: false}").train_dataset.shuffle is False
    assert problems_of(tmp_path, "train_dataset: {shuffle: no}") == [
        "train_dataset.shuffle: 'no' must be true or false"
    ]


def test_T090_environment_variables_are_put_in_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_KEY", " sk-abc \n")
    monkeypatch.setenv("H", "10.0.0.1")
    monkeypatch.setenv("STEPS", "7")
    config = load(
        tmp_path,
        "total_train_steps: ${STEPS}\ntrial_name: a-${H}-${H}\n"
        "api_gateway: {base_url: 'http://${H}:9/v1', api_key: '${ROUTER_KEY}'}",
        "experiment_name=${H}",
    )
    assert config.api_gateway is not None
    assert config.api_gateway.base_url == "http://10.0.0.1:9/v1"
    assert config.api_gateway.api_key == "sk-abc"
    assert (config.total_train_steps, config.trial_name, config.experiment_name) == (
        7,
        "a-10.0.0.1-10.0.0.1",
        "10.0.0.1",
    )


def test_T090_an_unset_variable_names_itself_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUTER_KEY", raising=False)
    monkeypatch.setenv("EMPTY", "")
    text = "api_gateway: {base_url: 'http://${ROUTER_KEY}/', api_key: '${ROUTER_KEY}'}"
    lines = problems_of(tmp_path, text)
    assert [line.partition(":")[0] for line in lines] == ["api_gateway.base_url", "api_gateway.api_key"]
    assert all("environment variable ROUTER_KEY is not set" in line for line in lines)
    [line] = problems_of(tmp_path, "api_gateway: {base_url: 'http://x', api_key: '${EMPTY}'}")
    assert "api_gateway.api_key: environment variable EMPTY is empty" in line
    assert load(tmp_path, "trial_name: 'x${EMPTY}'").trial_name == "x"


@pytest.mark.parametrize(
    ("base_url", "api_key"), [("http://x", "${ROUTER_KEY"), ("http://x", "$ROUTER_KEY"), ("http://${H/v1", "k-abc")]
)
def test_T090_a_variable_without_its_braces_is_not_sent_as_it_stands(
    tmp_path: Path, base_url: str, api_key: str
) -> None:
    lines = problems_of(tmp_path, f"api_gateway: {{base_url: '{base_url}', api_key: '{api_key}'}}")
    assert any("a variable is written ${NAME}, with both braces" in line for line in lines), lines
    config = load(
        tmp_path, "api_gateway: {base_url: 'http://x', api_key: 'k-$abc'}\nrollout: {reward: {rubric: '${5'}}"
    )
    assert config.api_gateway is not None
    assert (config.api_gateway.api_key, config.rollout.reward.rubric) == ("k-$abc", "${5")


def test_T089_a_word_in_a_list_of_numbers_is_shown_as_it_was_written(tmp_path: Path) -> None:
    [line] = problems_of(tmp_path, "rollout: {reward: {bounds: [0, high]}}")
    assert "'high'" in line
    [line] = problems_of(tmp_path, "actor: {optimizer: {lr: [1e-6]}}")
    assert "['1e-6']" in line


@pytest.mark.parametrize("value", ["sk-abc\n", "sk-abc\r\n", " sk-abc ", "\tsk-abc"])
def test_T102_outer_white_space_of_a_key_is_stripped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ROUTER_KEY", value)
    config = load(tmp_path, "api_gateway: {base_url: 'http://x', api_key: '${ROUTER_KEY}'}")
    assert config.api_gateway is not None
    assert config.api_gateway.api_key == "sk-abc"
    assert load(tmp_path, 'rollout: {agent: {internal_token: " k-1 "}}').rollout.agent.internal_token == "k-1"


def test_T102_T108_an_inner_control_character_names_the_variable_and_not_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("sk-aaaa\nbbbb", "sk-aaaa\rbbbb", "sk-aaaa\x7fbbbb"):
        monkeypatch.setenv("ROUTER_KEY", value)
        [line] = problems_of(tmp_path, "api_gateway: {base_url: 'http://x', api_key: '${ROUTER_KEY}'}")
        assert "ROUTER_KEY" in line
        assert "aaaa" not in line
        assert "bbbb" not in line
    [line] = problems_of(tmp_path, 'rollout: {agent: {admin_api_key: "aaaa\\nbbbb"}}')
    assert line.startswith("rollout.agent.admin_api_key: the secret has a line break")
    assert "aaaa" not in line


def test_references_read_other_keys_and_their_defaults(tmp_path: Path) -> None:
    text = "actor: {path: models/m, dtype: bfloat16}\nrollout: {native: {dtype: '${actor.dtype}'}}\n"
    config = load(
        tmp_path,
        text + "ref: {path: '${actor.path}'}\ntrial_name: 't-${seed}-${trial_of.x}'".replace("-${trial_of.x}", ""),
    )
    assert config.ref is not None
    assert config.ref.path == "models/m"
    assert config.rollout.native.dtype == "bfloat16"
    assert config.trial_name == "t-1"
    assert load(tmp_path, text + "ref: {path: '${actor.path}'}", "actor.path=other").ref.path == "other"  # type: ignore[union-attr]


def test_wrong_references_are_sentences(tmp_path: Path) -> None:
    [line] = problems_of(tmp_path, "trial_name: ${actor.pth}")
    assert line == "trial_name: ${actor.pth} names no key; did you mean ${actor.path}?"
    assert (
        "leads back to itself"
        in problems_of(tmp_path, "trial_name: ${experiment_name}\nexperiment_name: ${trial_name}")[0]
    )
    assert "neither an environment variable" in problems_of(tmp_path, "trial_name: '${a b}'")[0]


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("async: {staleness_treshold: 2}", "async.staleness_threshold"),
        ("rollout: {admin_api_key: x}", "rollout.agent.admin_api_key"),
        ("actor: {optimiser: {lr: 1}}", "actor.optimizer.lr"),
        ("total_steps: 3", "total_train_steps"),
        ("rollout: {agent: {moed: online}}", "rollout.agent.mode"),
        ("lr: 3", "actor.optimizer.lr"),
        ("actr: {path: x}", "actor.path"),
    ],
)
def test_T091_an_unknown_key_names_its_path_and_the_nearest(tmp_path: Path, written: str, near: str) -> None:
    [line] = problems_of(tmp_path, written)
    assert line.endswith(f"unknown key; did you mean {near}?")
    [path] = flatten(load_yaml(written), FILE)
    assert line.startswith(f"{path}: ")
    [on_command_line] = problems_of(tmp_path, "", f"{path}=1")
    assert on_command_line == line


def test_T091_a_key_below_a_value_and_a_value_at_a_section_are_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "", "rollout.backend.name=native") == [
        "rollout.backend.name: unknown key: rollout.backend is a value, not a section"
    ]
    assert "is a section" in problems_of(tmp_path, "rollout: native")[0]
    assert "sections and keys at the top are" in problems_of(tmp_path, "zzzzqqqq: 1")[0]


def test_all_errors_come_at_once_one_line_each(tmp_path: Path) -> None:
    lines = problems_of(
        tmp_path,
        "seed: x\nrollout: {workers: 0, backnd: y, agent: {mode: onlin}}\ntrain: {engine: archo}",
        "actor.backend=fsdp:q2",
        "nonsense",
        "scheduler.type=pbs",
    )
    assert len(lines) == 8
    text = "\n".join(lines)
    for part in (
        "seed: 'x'",
        "workers: '0'",
        "did you mean rollout.backend",
        "did you mean online?",
        "archo",
        "fsdp:q2",
    ):
        assert part in text
    assert "one of local, slurm, ray" in text


class Lists(Section):
    l: list[int] = []  # noqa: E741, RUF012
    words: list[str] = []  # noqa: RUF012
    n: int | None = 3
    b: bool = True
    s: str = "x"
    maybe: str | None = "x"


class Root(Section):
    a: Lists = Lists()


def override(*texts: str) -> Any:
    problems, settings = Problems(), flatten({}, FILE)
    for text in texts:
        merge(settings, flatten_override(text, paths_of(Root) - keys_of(Root).keys()))
    resolve_environment(settings, keys_of(Root), problems)
    config = build(Root, settings, problems)
    problems.raise_if_any()
    assert config is not None
    return config.a


def test_T092_overrides_take_lists_null_booleans_and_quoted_text() -> None:
    assert override("a.l=[1, 2]").l == [1, 2]
    assert override("a.words=[x,y]").words == ["x", "y"]
    assert override("a.words=[x, 'a, b', 010]").words == ["x", "a, b", "010"]
    assert override("a.n=null").n is None
    assert override("a.b=false").b is False
    assert override('a.s="null"').s == "null"
    assert override("a.s=''").s == ""
    assert override("a.s=").s == ""
    assert override("a.s=null").s == "null"  # a shell has eaten the quotes of "null"; this key cannot be null
    assert override("a.maybe=null").maybe is None
    assert override('a.maybe="null"').maybe == "null"
    assert override("a.s=x=y # z: [1").s == "x=y # z: [1"
    assert override("a.s=[::1]").s == "[::1]"
    assert override("a.s='it''s'").s == "it's"
    assert override("a={l: [3], b: false}").l == [3]
    assert override("a.n=1", "a.n=2").n == 2
    for text, reason in (
        ("a.x=1", "unknown key"),
        ("a.l=[1, x]", "list"),
        ("a.l=5", "list"),
        ("a.b=maybe", "true or false"),
    ):
        with pytest.raises(ConfigError, match=reason):
            override(text)


def test_T101_an_address_that_no_call_could_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    [line] = problems_of(tmp_path, "api_gateway: {base_url: 'http://h/v1/v1', api_key: sk-a-literal-key}")
    assert line.startswith("api_gateway.base_url='http://h/v1/v1' has 2 version segments (v1, v1); keep one of them")


def test_an_override_replaces_a_whole_section_and_the_reverse(tmp_path: Path) -> None:
    assert load(tmp_path, "critic: {path: m}", "critic=null").critic is None
    assert load(tmp_path, "critic: null", "critic.path=m").critic.path == "m"  # type: ignore[union-attr]
    assert load(tmp_path, "rollout:\n", "seed=2").rollout == RunConfig().rollout


@pytest.mark.parametrize("text", ["a: b: c", "x: [1", "\tx: 1", "seed: 1\nseed: 2", "- 1", "just words"])
def test_what_is_no_configuration_is_one_sentence_with_the_line(tmp_path: Path, text: str) -> None:
    [line] = problems_of(tmp_path, text)
    assert "config.yaml" in line


def test_files_that_are_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\); name a YAML file"):
        resolve(tmp_path)
    with pytest.raises(ConfigError, match="is no file; --agent-config names a Python file"):
        resolve(None, agent_config=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"experiment_name: caf\xe9")
    with pytest.raises(ConfigError, match=r"is no text in UTF-8 \(.+\); name a YAML file"):
        resolve(tmp_path / "latin.yaml")
    assert load(tmp_path, "") == load(tmp_path, "# nothing\n") == RunConfig()
    assert resolve(None).config == RunConfig()


def test_T111_names_that_look_like_paths_stay_data(tmp_path: Path) -> None:
    assert load(tmp_path, "", "trial_name=../../y").trial_name == "../../y"


def test_notes_become_warnings_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("rollout: {agent: {admin_api_key: my-secret-admin-key}}")
    load_config(path)
    assert "rollout.agent.admin_api_key is written out in the config file" in caplog.text
    assert "my-secret-admin-key" not in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [*a]", "nests too deep"),
        ("[" * 5000 + "]" * 5000, "nests too deep"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{k}: &{k} [{', '.join([f'*{chr(ord(k) - 1)}'] * 10)}]\n" for k in "bcdefghi"),
            "elements",
        ),
    ],
)
def test_anchors_that_never_end_are_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_yaml(text)


def test_the_variables_that_secrets_were_read_from_are_known_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "KEY": " k-1 ",
        "WORD": "password",
        "PLACE": "database",
        "TRIAL": "k",
        "FOLDER": "/data/of/us",
    }.items():
        monkeypatch.setenv(name, value)
    text = "trial_name: ${TRIAL}\nstore: {url: 'postgres://us:x${WORD}@${PLACE}/${TRIAL}'}\n"
    path = tmp_path / "c.yaml"
    path.write_text(text + "cluster: {fileroot: '${FOLDER}'}\n")
    config = resolve(path, ["rollout.agent.admin_api_key=${KEY}"]).config
    assert config.secret_variables == {"KEY", "WORD"}
    assert config.model_copy(update={"seed": 2}).secret_variables == {"KEY", "WORD"}
    assert resolve(None, ["store.url=postgresql://us@h${FOLDER}"]).config.secret_variables == set()


def test_a_secret_that_is_taken_out_hides_no_word() -> None:
    resolve(None, ["rollout.agent.internal_token=null", "rollout.agent.admin_api_key=that-is-one"])
    assert redact("null, that-is-one") == "null, …"
