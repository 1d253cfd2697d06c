"""Where what was recorded is kept, and for how long (`store`)."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from areal.config.section import Section


class StoreConfig(Section):
    url: str | None = Field(None, json_schema_extra={"secret": True})
    """`postgresql://USER:PASSWORD@HOST/DATABASE`: a Postgres database, needed only where processes of several hosts share a run; each run
    has a schema of its own in it. Needs `pip install 'areal[postgres]'`. null = store.sqlite in the run's folder."""

    @field_validator("url")
    @classmethod
    def _names_a_database(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("postgresql://", "postgres://")):
            raise ValueError("is no Postgres URL; write postgresql://USER:PASSWORD@HOST/DATABASE, or null for a file")
        if url is not None and re.search(r"[?&]schema=", url):
            raise ValueError("names a schema; leave it out, each run has one of its own")
        return url
