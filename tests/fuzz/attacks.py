"""What the fuzzers send: bodies, heads and bytes, mostly right and wrong in one or two places, since that is what gets deep.

    @given(st.data())
    def burst(data): ATTACKS["bodies"](target, data)

Each attack draws one request from hypothesis (so a failure shrinks to the smallest one), sends it and has the answer judged.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from areal.gateway.paths import PREFIXES, ROUTES
from tests.fuzz.target import ADMIN, BODY_LIMIT, FAILS, TOKEN, Header, Target, bearer

PATHS = sorted({prefix + path for prefix in PREFIXES for path in ROUTES} - {""})
LARGEST_BODY = 3 * BODY_LIMIT
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "QUERY"]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 7,
    "stop_token_ids": [7],
    "stream": False,
    "model": "default",
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be terse."}]},
        {"role": "user", "content": "2+2?", "name": "ada"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "add",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "max_tokens": 5,
    "n": 2,
    "stop": ["END"],
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "metadata": {"user_id": "u"},
    "prompt_cache_key": "k",
    "chat_template_kwargs": {"enable_thinking": False},
    "logit_bias": {},
    **SAMPLING,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "add"}], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"role": "developer", "content": "Be terse."},
    ],
    "instructions": "Be kind.",
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        {"type": "web_search"},
    ],
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 5,
    "previous_response_id": None,
    "metadata": {"a": "b"},
    "store": True,
    **SAMPLING,
}
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "add", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]}]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 5,
    "stop_sequences": ["END"],
    "thread": {"type": "create"},
    "metadata": {"user_id": '{"session_id": "s"}'},
    **SAMPLING,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/rl/start_session": {"task_id": "t", "api_key": None, "purpose": "train", "tags": {"a": "b"}, "request_id": "r"},
    "/rl/set_reward": {"reward": 1.0, "interaction_id": None, "session_id": "fuzz"},
    "/rl/session": {},
    "/rl/export_trajectories": {"session_id": "fuzz", "style": "concat", "discount": 1.0},
    "/rl/exclude_session": {"session_id": "other", "reason": "r", "delete": False},
    "/control/challenge": {"nonce": "n"},
    "/control/attach": {"nonce": "n", "proof": "p"},
}
ADMINS = ("/rl/start_session", "/rl/export_trajectories", "/rl/exclude_session")


class Raw(str):
    """Text that stands in a body as it is."""


class Twice(dict[str, Any]):
    """An object that says its members twice, the second time another value."""


ODD = [
    *(Raw(text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E-400", "-0", "0.0", "1.0", "1e3", "01", "+1", "nul")),
    *(Raw(text) for text in ('"\\ud800"', '"\\udfff \\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', "'x'", "[1,]", "{,}", "", "{}", "[]")),
    *(Raw("9" * digits) for digits in (19, 20, 400, 5000)), Raw("0." + "3" * 400), Raw("[" * 300 + "]" * 300), Raw('{"a":' * 300 + "1" + "}" * 300),
    Raw("[" * 5000), None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, 1e-320, 1e308, "", " ", "x", "\n", "\0",
    "\x7f", "é", "👩‍💻", "\u2028", "\ufffe", "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "</think>", "{{ 7*7 }}", "{% for %}", "../../x", "%00",
    "x" * 600, "y" * 70_000, FAILS, "default", "reward_model", "none", "required", "json_object", "resp_1", [], {}, [[]], [None], [{}], {"": None},
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "text", "text": None}, ["a", "b"], [0] * 300,
]  # fmt: skip


def written(value: Any) -> str:
    """JSON, but for what is odd on purpose."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}:{written(one)}" for name, one in value.items()]
        again = [f"{json.dumps(name)}:1" for name in value] if isinstance(value, Twice) else []
        return "{" + ",".join(members + again) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into it, the empty one first."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        found += places(one, (*path, name))
    return found


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy in which the value at this path is another one; Twice and Raw stay what they are."""
    if not path:
        return change(value)
    first, *rest = path
    if isinstance(value, dict):
        return type(value)(
            {name: changed(one, tuple(rest), change) if name == first else one for name, one in value.items()}
        )
    return [changed(one, tuple(rest), change) if k == first else one for k, one in enumerate(value)]


def _mutation(data: st.DataObject, value: Any) -> Any:
    kind = data.draw(st.sampled_from(["odd", "odd", "odd", "drop", "twice", "many"]))
    path = data.draw(st.sampled_from(places(value)))
    if kind == "odd":
        odd = data.draw(
            st.sampled_from(ODD)
            | st.text(max_size=20)
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
        )
        return changed(value, path, lambda _: odd)
    if kind == "twice":
        return changed(value, path, lambda one: Twice(one) if isinstance(one, dict) else one)
    if kind == "many":
        times = data.draw(st.sampled_from([2, 50, 1000]))
        return changed(value, path, lambda one: repeated(one, times) if isinstance(one, list) else one)
    if not path:
        return value
    return changed(value, path[:-1], lambda one: _without(one, path[-1]))


def repeated(items: list[Any], times: int) -> list[Any]:
    """The items so many times, or as often as makes a body well above every limit: three thousandfold lists in one another fill
    any memory, the client's own first."""
    return items * min(times, 1 + LARGEST_BODY // (1 + len(written(items))))


def _without(value: Any, name: Any) -> Any:
    if isinstance(value, dict):
        return type(value)({key: one for key, one in value.items() if key != name})
    return [one for k, one in enumerate(value) if k != name]


def _encoded(data: st.DataObject, body: bytes) -> tuple[bytes, list[Header]]:
    """The body in some content-encoding, true or not."""
    kind = data.draw(st.sampled_from(["plain"] * 8 + ["gzip", "deflate", "twice", "many", "lie", "unknown", "cut"]))
    if kind == "plain":
        return body, []
    if kind == "deflate":
        return zlib.compress(body), [("Content-Encoding", "deflate")]
    if kind == "twice":
        return gzip.compress(gzip.compress(body)), [("Content-Encoding", "gzip, gzip")]
    if kind == "many":
        return gzip.compress(body), [("Content-Encoding", ", ".join(["gzip"] * 1000))]
    names = {"gzip": "gzip", "cut": "gzip", "lie": "gzip", "unknown": "br"}
    packed = {"gzip": gzip.compress(body), "cut": gzip.compress(body)[:-5], "lie": body, "unknown": body}
    return packed[kind], [("Content-Encoding", names[kind])]


TYPES = st.sampled_from(
    ["application/json"] * 4
    + ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x", ""]
)


def bodies(target: Target, data: st.DataObject) -> None:
    """A body for a route, nearly right."""
    path = data.draw(st.sampled_from(sorted(BODIES)))
    value: Any = BODIES[path]
    for _ in range(data.draw(st.integers(0, 3))):
        value = _mutation(data, value)
    if isinstance(value, dict) and data.draw(st.booleans()):
        value = type(value)({**value, "stream": True}) if "stream" in value else value
    plain = written(value).encode("utf-8", "surrogatepass")
    body, encoding = _encoded(data, plain)
    key = ADMIN if path in ADMINS else data.draw(st.sampled_from([target.key, target.key, TOKEN]))
    headers = [bearer(key), ("Content-Type", data.draw(TYPES)), *encoding]
    if key == TOKEN:
        headers.append(("x-session-id", data.draw(st.sampled_from(["one", "two"]))))
    target.judge(target.send("POST", path, body, headers), (path, plain, headers))


_HEADER_TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30)
_NAMES = st.sampled_from([
    "Authorization", "x-api-key", "x-request-id", "x-session-id", "x-areal-topic", "x-stainless-retry-count", "Origin", "Accept", "Expect",
    "Content-Type", "Content-Encoding", "Connection", "Upgrade", "Cookie", "Range", "If-None-Match", "User-Agent", "anthropic-version", "Forwarded",
    "X-Forwarded-Host", "TE", "Trailer", "Via", "x",
])  # fmt: skip


def heads(target: Target, data: st.DataObject) -> None:
    """Any method on any path with any headers; the body is a right one."""
    method = data.draw(st.sampled_from(METHODS))
    path = data.draw(st.sampled_from(PATHS) | st.text(max_size=30).map(lambda text: "/" + quote(text, safe="/")))
    for _ in range(data.draw(st.integers(0, 2))):
        path = data.draw(st.sampled_from([
            path + "/", path + "//", "/" + path, path + "/..", path + "/%2e%2e", path.replace("/", "%2F", 1), path + "%00", path + "%ff", path + "%",
            path + "?beta=true", path + "?" + "a=b&" * 200, path + "?x=%zz", path + "#x", path + ";x=1", path.upper(), path + "/models/" + "x" * 3000,
            path + "/" + "y" * 70_000, path + "\xff", path + "?\xff",
        ]))  # fmt: skip
    headers = data.draw(st.lists(st.tuples(_NAMES, _HEADER_TEXT), max_size=4))
    flood = data.draw(st.sampled_from([0, 0, 0, 0, 100, 20_000]))
    headers += [(f"x-flood-{k}", "v") for k in range(flood)]
    if data.draw(st.booleans()):
        headers.append(bearer(data.draw(st.sampled_from([target.key, ADMIN, TOKEN, "sk-sess-w0.x.y", ""]))))
    body = b"" if method in ("GET", "HEAD") else written(CHAT).encode()
    headers = [pair for pair in headers if not (pair[0] == "Expect" and pair[1].strip().lower() == "100-continue")]
    target.judge(target.send(method, path, body, headers), (method, path[:200], headers[:20]))


def raw(target: Target, data: st.DataObject) -> None:
    """Bytes that were a request once."""
    body = written(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.address}\r\nAuthorization: Bearer {target.key}\r\n"
    framing = data.draw(st.sampled_from([
        f"Content-Length: {len(body)}\r\n", f"Content-Length: {len(body) * 2}\r\n", "Content-Length: -1\r\n", "Content-Length: 99999999999999999999\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n", "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: gzip, chunked\r\n", "Connection: Upgrade\r\nUpgrade: h2c\r\n", f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n",
        " folded: x\r\n", "",
    ]))  # fmt: skip
    sent = bytearray(head.encode() + framing.encode() + b"\r\n" + body)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(sent)))
        piece = data.draw(
            st.binary(max_size=8)
            | st.sampled_from([b"\r\n", b"\r\n\r\n", b"\0", b"\n", b" ", b"\xff\xfe", b"A" * 70_000])
        )
        cut = data.draw(st.integers(0, 40))
        sent[at : at + cut] = piece
    target.throw(bytes(sent[: data.draw(st.sampled_from([len(sent), len(sent), 40, 200, 400]))]))
    target.judge(target.send("GET", "/health"), "health after raw bytes")


ATTACKS: dict[str, Callable[[Target, st.DataObject], None]] = {"bodies": bodies, "heads": heads, "raw": raw}
