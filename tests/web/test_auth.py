"""Keys: signed with their worker, compared in constant time, taken from either header."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import ConfigError, Forbidden, InvalidKey
from areal.base.guide import situation
from areal.web.auth import (
    PREFIX,
    SessionKeys,
    key_hash,
    load_or_create_signing_key,
    opens,
    presented_keys,
    require,
)

SECRET = bytes(range(32))
KEYS = SessionKeys(SECRET)
KEY = KEYS.mint("w0")


def test_a_key_is_built_as_the_architecture_says() -> None:
    worker, secret, mac = KEY.removeprefix("sk-sess-").split(".")
    naive = hmac.new(SECRET, f"{worker}.{secret}".encode(), hashlib.sha256).digest()[:16]
    assert mac == urlsafe_b64encode(naive).rstrip(b"=").decode()
    assert KEYS.check(KEY).worker == worker == "w0"
    assert KEYS.check(KEY).hash == key_hash(KEY) == hashlib.sha256(KEY.encode()).hexdigest()
    assert KEYS.mint("w0") != KEY


@given(st.integers(0, len(KEY) - 1), st.characters())
def test_T109_a_key_with_any_character_changed_is_refused(at: int, character: str) -> None:
    forged = KEY[:at] + character + KEY[at + 1 :]
    if forged != KEY:
        with pytest.raises(InvalidKey):
            KEYS.check(forged)


@pytest.mark.parametrize("key", ["", "sk-sess-", "sk-sess-WRONG123", "sk-sess-..", "sk-sess-w0.x.", "x" * 10_000, "é"])
def test_T109_what_is_no_key_is_refused_without_being_repeated(key: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        KEYS.check(key)
    assert key == "" or key not in str(refused.value)


def test_a_key_of_another_service_is_refused() -> None:
    with pytest.raises(InvalidKey, match="not issued by this service"):
        SessionKeys(bytes(32)).check(KEY)
    with pytest.raises(ValueError, match="worker id"):
        KEYS.mint("w.0")


def test_T024_keys_come_from_bearer_or_x_api_key_whatever_else_stands_there() -> None:
    key = KEY.encode()
    bearer, api_key, basic = (
        (b"authorization", b"Bearer " + key),
        (b"x-api-key", key),
        (b"authorization", b"Basic YTpi"),
    )
    for headers in ([bearer], [api_key], [basic, api_key], [bearer, api_key], [(b"authorization", b"bEaReR  " + key)]):
        assert presented_keys(headers) == (KEY,)
        assert KEYS.session_key(presented_keys(headers)).worker == "w0"
    for headers in (
        [],
        [basic],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"x-api-key", b"")],
    ):
        assert presented_keys(headers) == ()
        with pytest.raises(InvalidKey, match="no key was sent"):
            KEYS.session_key(presented_keys(headers))


def test_T024_a_wrong_bearer_does_not_hide_a_good_x_api_key() -> None:
    presented = presented_keys([(b"authorization", b"Bearer dummy"), (b"x-api-key", KEY.encode())])
    assert KEYS.session_key(presented).text == KEY


def test_T109_an_empty_secret_opens_nothing() -> None:
    for secret in ("", None):
        assert not opens(("",), secret)
        assert not opens((), secret)
    assert opens(("x", "admin"), "admin")
    assert not opens(("Admin",), "admin")
    assert opens(("schlüssel",), "schlüssel")
    with pytest.raises(InvalidKey, match="admin key"):
        require((KEY,), "other", "admin key (rollout.agent.admin_api_key)")


def test_T109_a_session_key_is_no_admin_key_and_the_reverse() -> None:
    assert not opens((KEY,), "areal-admin-key")
    with pytest.raises(InvalidKey):
        KEYS.session_key(("areal-admin-key",))


def test_the_signing_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "root" / "signing.key"
    key = load_or_create_signing_key(path)
    assert len(key) == 32
    assert load_or_create_signing_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert SessionKeys.load(path.parent).check(SessionKeys(key).mint("w1")).worker == "w1"


def test_a_readable_or_damaged_signing_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    load_or_create_signing_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_create_signing_key(path)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(ConfigError, match="not a signing key"):
        load_or_create_signing_key(path)


def test_processes_that_start_together_agree_on_the_signing_key(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from areal.web.auth import load_or_create_signing_key as load\n"
        "sys.stdin.readline()\n"
        "for n in range(20): print(load(pathlib.Path(sys.argv[1]) / str(n) / 'signing.key').hex())"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for child in children:  # started, now released together
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    outputs = {child.communicate()[0] for child in children}
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 20


def test_the_prefix_is_the_documented_one() -> None:
    assert KEY.startswith(PREFIX) and PREFIX == "sk-sess-"  # noqa: PT018


@pytest.mark.parametrize("key", ["sk-ant-oat01-abc-def", "sk-ant-api03-abc"])
def test_credentials_of_anthropic_are_told_how_claude_code_is_configured(key: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        KEYS.session_key([key])
    assert situation("oauth").said_in(str(refused.value))
    assert "abc" not in str(refused.value)
    assert KEYS.session_key([key, KEY]).text == KEY  # logged in, and the gateway's key beside it


def test_a_model_only_key_leads_to_its_session_and_is_no_session_key() -> None:
    session = KEYS.check(KEY)
    key = KEYS.model_key(session)
    assert key == KEYS.model_key(session)
    assert key.startswith("sk-model-w0.")
    assert KEY.split(".")[1] not in key
    opened = KEYS.check(key, model_only=True)
    assert (opened.hash, opened.worker, opened.model_only) == (session.hash, "w0", True)
    with pytest.raises(Forbidden, match="opens model calls only"):
        KEYS.check(key)
    assert KEYS.session_key([key, KEY]).text == KEY
    assert KEYS.session_key([key], model_only=True) == opened
    with pytest.raises(InvalidKey, match="not issued by this service"):
        SessionKeys(bytes(32)).check(key, model_only=True)


def test_neither_kind_of_key_passes_for_the_other() -> None:
    key = KEYS.model_key(KEYS.check(KEY))
    for forged in (key.replace("sk-model-", PREFIX), KEY.replace(PREFIX, "sk-model-"), key.replace("w0", "w1")):
        with pytest.raises(InvalidKey):
            KEYS.check(forged, model_only=True)


@given(st.integers(0, 100), st.characters())
def test_a_model_only_key_with_any_character_changed_is_refused(at: int, character: str) -> None:
    key = KEYS.model_key(KEYS.check(KEY))
    forged = key[:at] + character + key[at + 1 :]
    if forged != key:
        with pytest.raises(InvalidKey):
            KEYS.check(forged, model_only=True)
