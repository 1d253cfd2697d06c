"""One HTTP call and its error as a sentence, on the standard library alone; shared by the scripts of this folder."""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NoReturn

# A proxy of the outside world must not catch calls to this service.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ADDRESS = re.compile(r"https?://[^\s/:]+(:\d+)?(/|$)|https?://\[[0-9a-fA-F:.]+\](:\d+)?(/|$)")


def call(url: str, path: str, key: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, Any]:
    """POST (GET without a body); returns (status, JSON). An unreachable service ends the script with exit code 1."""
    if not _ADDRESS.match(url):
        die(
            f"{url!r} is no address of a service; write it with http://, as the service printed it: http://127.0.0.1:8090"
        )
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            return error.code, json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return error.code, f"HTTP {error.code}: {text[:300]}"
    except (OSError, ValueError) as error:
        place = urllib.parse.urlsplit(url)
        reason = getattr(error, "reason", error)
        die(
            f"local proxy failed, gateway at {place.netloc or url} not reachable ({reason}): start the service, or see gateway.log for why it "
            f"ended; if another program has the port (lsof -i:{place.port or 80}), choose another one (rollout.agent.gateway_port) and tell "
            "the agent"
        )


def say(name: str, value: object, script: bool = False) -> None:
    """For people on stdout; for scripts as NAME=value on stderr."""
    print(f"{name}={value}" if script else f"{name}: {value}", file=sys.stderr if script else sys.stdout)


def die(reason: object) -> NoReturn:
    print(f"failed: {reason}", file=sys.stderr)
    raise SystemExit(1)
