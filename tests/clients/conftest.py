"""The running service of service.py as a fixture, `make_service`, and `eventually`."""

from __future__ import annotations

from tests.proxy.service import eventually, make_service

__all__ = ["eventually", "make_service"]
