"""Who is calling: session keys that carry their worker, and the comparison of every other secret.

    keys = SessionKeys.load(Path(config.cluster.fileroot))       # signing.key, made once per fileroot
    key = keys.mint("w0")                                        # sk-sess-w0.<secret>.<mac>
    keys.session_key(presented_keys(scope["headers"])).worker    # "w0", or InvalidKey (401)
    keys.model_key(keys.check(key))                              # sk-model-w0.<hash of the key>.<mac>: model calls, nothing else
    opens(presented_keys(headers), admin_key)                    # constant-time; an empty secret opens nothing

mac = first 16 bytes of HMAC-SHA256(signing.key, "<worker>.<secret>"), base64url without padding. A key proves only that
it was minted here: whether its session lives is the store's knowledge, under `key_hash`. A model-only key carries that hash and a mac
of its own, so nobody keeps it, and neither key can be made from it. No torch, no network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from areal.base.atomic import sync_folder
from areal.base.errors import ConfigError, Forbidden, InvalidKey
from areal.base.guide import OAUTH

PREFIX = "sk-sess-"
MODEL_PREFIX = "sk-model-"
DEFAULT_ADMIN_KEY = "areal-admin-key"
DEFAULT_INTERNAL_TOKEN = "gateway-internal-token"
SIGNING_KEY_FILE = "signing.key"

_SIGNING_KEY_BYTES = 32
_WORKER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_KEY = 512
_REMEMBERED_KEYS = 4096  # good ones; every request of a session brings its key
_ANTHROPIC = "sk-ant-"  # keys of theirs, and the OAuth tokens that Claude Code sends where it is logged in
_IMPLICIT = "implicit"  # in the place of the worker: sessions that opened by themselves may be served by any
_SEALED = "\0sealed\0"  # keeps seals apart from every text that a key signs
_MODEL_ONLY = "\0model only\0"  # and these

RawHeaders = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A key whose signature is good. worker: the logical worker that holds its session. model_only: it opens model calls."""

    text: str
    worker: str
    model_only: bool = False

    @property
    def hash(self) -> str:
        """Of the session's key, which a model-only key carries."""
        return _carried(self.text) if self.model_only else key_hash(self.text)


class SessionKeys:
    """Mints and checks session keys with one signing secret."""

    def __init__(self, signing_key: bytes) -> None:
        if len(signing_key) < _SIGNING_KEY_BYTES:
            raise ValueError(f"a signing key has {_SIGNING_KEY_BYTES} bytes, not {len(signing_key)}")
        self._signing_key = signing_key
        self._parsed = lru_cache(_REMEMBERED_KEYS)(self._parse)  # remembers no key that is refused

    @classmethod
    def load(cls, fileroot: Path) -> SessionKeys:
        """With `<fileroot>/signing.key`, made if there is none."""
        return cls(load_or_create_signing_key(fileroot / SIGNING_KEY_FILE))

    def mint(self, worker: str, request_id: str | None = None) -> str:
        """A new key for a session of this logical worker; the same request id gives the same key again."""
        if not _WORKER.fullmatch(worker):
            raise ValueError(f"worker id {worker!r} must be 1..64 letters, digits, - or _")
        secret = secrets.token_urlsafe(24) if request_id is None else self._secret_of(request_id)
        body = f"{worker}.{secret}"
        return f"{PREFIX}{body}.{self._mac(body)}"

    def model_key(self, key: SessionKey) -> str:
        """The model-only key of this session key; always the same one, so it also serves what is refreshed under that key."""
        body = f"{key.worker}.{base64.urlsafe_b64encode(bytes.fromhex(key.hash)).rstrip(b'=').decode()}"
        return f"{MODEL_PREFIX}{body}.{self._mac(_MODEL_ONLY + body)}"

    def check(self, key: str, *, model_only: bool = False) -> SessionKey:
        """The key with its worker. Raises InvalidKey for anything that was not minted with this signing secret, and Forbidden
        for a model-only key unless `model_only` says that one will do."""
        checked = self._parsed(key)
        if checked.model_only and not model_only:
            raise Forbidden("this key opens model calls only; use the session key that start_session gave")
        return checked

    def _parse(self, key: str) -> SessionKey:
        refuse_credentials_of_anthropic([key])
        prefix, signs = (MODEL_PREFIX, _MODEL_ONLY) if key.startswith(MODEL_PREFIX) else (PREFIX, "")
        parts = key.removeprefix(prefix).split(".") if key.startswith(prefix) and len(key) <= _LONGEST_KEY else []
        if len(parts) != 3 or not key.isascii() or not _WORKER.fullmatch(parts[0]):
            raise InvalidKey("this is not a session key; session keys come from POST /rl/start_session")
        if not hmac.compare_digest(self._mac(f"{signs}{parts[0]}.{parts[1]}").encode(), parts[2].encode()):
            raise InvalidKey("this session key was not issued by this service; start a session to get one")
        return SessionKey(key, parts[0], model_only=bool(signs))

    def session_key(self, presented: Sequence[str], *, model_only: bool = False) -> SessionKey:
        """The first good session key of those a request presents (see `presented_keys`). model_only: a model-only key will do.

        Raises InvalidKey, Forbidden."""
        failure: InvalidKey | Forbidden = InvalidKey("no key was sent; put it in Authorization: Bearer … or x-api-key")
        for key in presented:
            try:
                return self.check(key, model_only=model_only)
            except (InvalidKey, Forbidden) as reason:
                failure = reason
        raise failure

    def of_topic(self, topic: str, place: int) -> SessionKey:
        """The key of an implicit session (proxy/implicit.py), the same in every worker. No client ever sees it."""
        return self.check(self.mint(_IMPLICIT, f"\0implicit\0{place}\0{topic}"))  # request ids hold no zero byte

    def seal(self, text: str) -> str:
        """The text as a header value that only a holder of the signing secret can make."""
        body = base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()
        return f"{body}.{self._mac(_SEALED + body)}"

    def unseal(self, sealed: str) -> str:
        """The text that was sealed. Raises InvalidKey for what was not sealed with this signing secret."""
        body, _, mac = sealed.partition(".")
        if not hmac.compare_digest(self._mac(_SEALED + body).encode(), mac.encode("utf-8", "surrogatepass")):
            raise InvalidKey("this session hint was not set by the gateway of this run; call the gateway")
        return base64.urlsafe_b64decode(body).decode("utf-8", "surrogatepass")

    def _secret_of(self, request_id: str) -> str:
        # The zero bytes keep this apart from every text that _mac signs.
        digest = hmac.digest(
            self._signing_key, b"\0request id\0" + request_id.encode("utf-8", "surrogatepass"), "sha256"
        )
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def _mac(self, body: str) -> str:
        mac = hmac.digest(self._signing_key, body.encode(), "sha256")[:16]
        return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


def key_hash(key: str) -> str:
    """SHA-256, hex: what the store keeps instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _carried(model_key: str) -> str:
    """The hash of the session key that a good model-only key carries."""
    return base64.urlsafe_b64decode(model_key.split(".")[1] + "=").hex()


def load_or_create_signing_key(path: Path) -> bytes:
    """32 bytes from `path` (mode 0600), made if there is none; of several that try at once, one wins and all agree.

    Raises ConfigError if others may read the file or its content is not a signing key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _create_signing_key(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} signs session keys but has mode {mode:04o}; run `chmod 600 {path}`")
    try:
        key = binascii.unhexlify(path.read_bytes().strip())
    except binascii.Error:
        key = b""
    if len(key) != _SIGNING_KEY_BYTES:
        raise ConfigError(f"{path} is not a signing key; delete it (running sessions then lose their keys)")
    return key


def refuse_credentials_of_anthropic(presented: Sequence[str]) -> None:
    """Raises InvalidKey with how Claude Code is configured, where one is among these: no other answer would help."""
    if any(key.startswith(_ANTHROPIC) for key in presented):
        raise InvalidKey(OAUTH.text())


def presented_keys(headers: RawHeaders) -> tuple[str, ...]:
    """Every key a request carries: Bearer values of Authorization (scheme in any case), then x-api-key values.

    headers: ASGI's raw pairs, names in lower case. Other schemes and empty values are not keys."""
    bearers: list[str] = []
    api_keys: list[str] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer":
                bearers.append(rest.strip())
        elif name == b"x-api-key":
            api_keys.append(value.decode("latin-1").strip())
    return tuple(dict.fromkeys(key for key in bearers + api_keys if key))


def opens(presented: Sequence[str], secret: str | None) -> bool:
    """Whether one of the presented keys is this secret (admin key, internal token, run token). Constant-time."""
    if not secret:
        return False
    wanted = secret.encode("utf-8", "surrogatepass")
    return any(hmac.compare_digest(key.encode("utf-8", "surrogatepass"), wanted) for key in presented)


def require(presented: Sequence[str], secret: str | None, what: str) -> None:
    """Raise InvalidKey naming `what` (for example "admin key, rollout.agent.admin_api_key") unless one opens."""
    if not opens(presented, secret):
        raise InvalidKey(f"this call needs the {what}" if presented else f"no key was sent; this call needs the {what}")


def _create_signing_key(path: Path) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(handle, secrets.token_hex(_SIGNING_KEY_BYTES).encode() + b"\n")
        os.fsync(handle)
        os.link(aside, path)  # fails where another process was first: its key is as good as ours
    except FileExistsError:
        pass
    finally:
        os.close(handle)
        aside.unlink()
    sync_folder(path.parent)
