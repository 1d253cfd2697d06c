"""`installed(AGENTS)`: real agents in the versions that tests/clients pins; a test is skipped, with the reason, without them."""

from __future__ import annotations

from tests.clients.conftest import installed

__all__ = ["installed"]
