"""Where what was recorded is kept, and for how long (`store`)."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from areal.config.section import Section


class StoreConfig(Section):
    url: str | None = Field(None, json_schema_extra={"secret": True})
    """`postgresql://USER:PASSWORD@HOST/DATABASE`: a Postgres database, needed only where processes of several hosts share a run; each run
    has a schema of its own in it. Needs `pip install 'areal[postgres]'`. null = store.sqlite in the run's folder."""
    keep_steps: int | None = Field(None, ge=0)
    """Delete what was said (messages, token ids, log-probs) in sessions that were trained more than so many steps ago, and in dropped and
    evaluation sessions as old as these; null = keep all. Never before the oldest recovery state holds that step; facts and sums stay."""
    keep_seconds: float | None = Field(None, gt=0)
    """The same by the time since a trained, dropped or evaluation session ended, in seconds."""
    keep_bytes: int | None = Field(None, gt=0)
    """The same, oldest first, while the records in store.sqlite take more bytes than this; only without store.url."""

    @field_validator("url")
    @classmethod
    def _names_a_database(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("postgresql://", "postgres://")):
            raise ValueError("is no Postgres URL; write postgresql://USER:PASSWORD@HOST/DATABASE, or null for a file")
        if url is not None and re.search(r"[?&]schema=", url):
            raise ValueError("names a schema; leave it out, each run has one of its own")
        return url
