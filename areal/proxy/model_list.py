"""The list of models as `GET /models` answers it, in a shape that the OpenAI and the Anthropic SDK both read.

    model_list(["default", "smollm2-135m"])

Used by app.py for the policy's names, and by gateway/channel.py for those of the upstream channel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any


def model_list(names: Iterable[str]) -> dict[str, Any]:
    """One entry for each name, once. names: at least one."""
    created = int(time.time())
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    data = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "areal",
            "type": "model",
            "display_name": name,
            "created_at": stamp,
        }
        for name in dict.fromkeys(names)
    ]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
