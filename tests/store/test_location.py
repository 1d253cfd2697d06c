"""Where a run's sessions are, for the run itself and for whoever comes later."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from areal.base.errors import ConfigError
from areal.config.load import load_config
from areal.store import store_url
from areal.store.location import choose_store, find_store, has_store, schema_of

URL = "postgresql://user:geheim@db/areal"


def test_a_run_without_a_url_has_a_file_in_its_folder(tmp_path: Path) -> None:
    assert not has_store(tmp_path)
    with pytest.raises(ConfigError, match=r"has no store\.sqlite"):
        find_store(tmp_path)
    url = choose_store(tmp_path, None, "exp/trial/1")
    assert url == store_url(tmp_path / "store.sqlite")
    (tmp_path / "store.sqlite").touch()
    assert has_store(tmp_path)
    assert find_store(tmp_path) == url
    with pytest.raises(ConfigError, match=r"take store\.url out"):
        choose_store(tmp_path, URL, "exp/trial/1")


def test_a_run_in_a_database_has_a_schema_of_its_own_that_a_resume_finds_again(tmp_path: Path) -> None:
    url = choose_store(tmp_path, URL, "Exp/träl 1/ab")
    assert url == f"{URL}?schema={schema_of('Exp/träl 1/ab')}"
    assert find_store(tmp_path) == url
    assert stat.S_IMODE((tmp_path / "store.url").stat().st_mode) == 0o600
    assert choose_store(tmp_path, f"{URL}?sslmode=require", "Exp/träl 1/ab").endswith(
        "?sslmode=require&schema=" + url[-len(schema_of("Exp/träl 1/ab")) :]
    )
    with pytest.raises(ConfigError, match=r"set store\.url again"):
        choose_store(tmp_path, None, "Exp/träl 1/ab")
    names = {schema_of(run_id) for run_id in ("a/b", "a_b", "A/b", "x" * 200, "x" * 201)}
    assert len(names) == 5
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name) for name in names)


@pytest.mark.parametrize("bad", ["mysql://x/y", "sqlite:///x", "postgresql://h/d?schema=mine"])
def test_a_url_that_names_no_database_of_its_own_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        load_config(None, [f"store.url={bad}"])
