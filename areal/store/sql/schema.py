"""The tables of the store and how an old one becomes a new one, once for every database.

    migrate(connection, engine)      # in one write transaction; raises StoreError for a store of a later release

State is facts, not counters: a group runs while it is neither accepted nor dropped, waits while accepted and neither consumed nor
dropped, and every count is a SELECT over the partial indices below, which hold only the rows in that state. The small facts
of an interaction and its arrays lie in two tables, so that setting a reward or summing tokens never touches a blob.

A change of layout appends to MIGRATIONS; the statements that stand there never change. They are SQLite's; postgres.py puts its own
types in their place.
"""

from __future__ import annotations

from areal.base.errors import StoreError
from areal.store.sql.engine import Connection, Engine

_VERSION_1 = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

CREATE TABLE task_groups (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id TEXT NOT NULL,
    n_samples INTEGER NOT NULL,
    opened_at REAL NOT NULL,
    deadline REAL NOT NULL,
    accepted_at REAL,
    dropped_at REAL,
    drop_reason TEXT,
    consumed_step INTEGER,
    consumed_incarnation TEXT
) STRICT;
CREATE INDEX groups_of_task ON task_groups (task_id, seq) WHERE accepted_at IS NULL AND dropped_at IS NULL;
CREATE INDEX groups_running ON task_groups (deadline) WHERE accepted_at IS NULL AND dropped_at IS NULL;
CREATE INDEX groups_waiting ON task_groups (seq)
    WHERE accepted_at IS NOT NULL AND consumed_step IS NULL AND dropped_at IS NULL;
CREATE INDEX groups_dropped ON task_groups (drop_reason) WHERE dropped_at IS NOT NULL;
CREATE INDEX groups_consumed ON task_groups (consumed_step) WHERE consumed_step IS NOT NULL;

CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    task_id TEXT NOT NULL,
    suffix INTEGER NOT NULL,
    group_seq INTEGER REFERENCES task_groups (seq),
    sample INTEGER NOT NULL,
    key_hash TEXT NOT NULL,
    worker TEXT NOT NULL,
    purpose TEXT NOT NULL,
    tags TEXT NOT NULL,
    request_id TEXT UNIQUE,
    started_at REAL NOT NULL,
    last_active_at REAL NOT NULL,
    ending TEXT,
    ended_at REAL,
    drop_reason TEXT
) STRICT;
CREATE INDEX sessions_of_task ON sessions (task_id, suffix);
CREATE INDEX sessions_of_group ON sessions (group_seq);
CREATE INDEX sessions_of_evaluation ON sessions (seq) WHERE group_seq IS NULL;
CREATE INDEX sessions_of_key ON sessions (key_hash, seq);
CREATE INDEX sessions_idle ON sessions (last_active_at) WHERE ending IS NULL;
CREATE INDEX sessions_of_worker ON sessions (worker) WHERE ending IS NULL;
CREATE INDEX sessions_dropped ON sessions (drop_reason) WHERE drop_reason IS NOT NULL;

CREATE TABLE interactions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session_seq INTEGER NOT NULL REFERENCES sessions (seq),
    id TEXT NOT NULL UNIQUE,
    idx INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reward REAL,
    tags TEXT NOT NULL,
    token_parent TEXT,
    credit_parent TEXT,
    branch_reason TEXT NOT NULL,
    model TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    temperature REAL NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL
) STRICT;
CREATE INDEX interactions_of_session ON interactions (session_seq, output_tokens);

CREATE TABLE recordings (
    seq INTEGER PRIMARY KEY REFERENCES interactions (seq),
    prompt_ids BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    versions BLOB NOT NULL,
    kept_mass BLOB NOT NULL,
    constrained BLOB,
    messages TEXT NOT NULL,
    reply TEXT NOT NULL,
    tools TEXT NOT NULL,
    sampling TEXT NOT NULL
) STRICT;

CREATE TABLE token_accounts (
    session_seq INTEGER NOT NULL REFERENCES sessions (seq),
    reason TEXT NOT NULL, -- '' = trained, else why masked
    tokens INTEGER NOT NULL,
    PRIMARY KEY (session_seq, reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE versions (label INTEGER PRIMARY KEY, step INTEGER NOT NULL, incarnation TEXT NOT NULL) STRICT;

CREATE TABLE workers (
    id TEXT PRIMARY KEY, url TEXT NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, heartbeat_at REAL NOT NULL
) STRICT;
"""

_VERSION_2 = """
ALTER TABLE interactions ADD COLUMN request_id TEXT NOT NULL DEFAULT '';
"""

_VERSION_3 = """
ALTER TABLE sessions ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
"""

_VERSION_4 = """
ALTER TABLE recordings ADD COLUMN fork TEXT NOT NULL DEFAULT '';
"""

_VERSION_5 = """
ALTER TABLE task_groups ADD COLUMN taken_step INTEGER;
ALTER TABLE task_groups ADD COLUMN taken_incarnation TEXT;
CREATE INDEX groups_taken ON task_groups (taken_step) WHERE taken_step IS NOT NULL;
ALTER TABLE sessions ADD COLUMN excluded_because TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN deleted_at REAL;
"""

_VERSION_6 = """
ALTER TABLE token_accounts ADD COLUMN interactions INTEGER NOT NULL DEFAULT 0;
-- A session that was accounted for in tokens alone: its interactions are counted together, as trained where any token was.
UPDATE token_accounts SET interactions = (SELECT count(*) FROM interactions i WHERE i.session_seq = token_accounts.session_seq)
WHERE reason = (
    SELECT b.reason FROM token_accounts b WHERE b.session_seq = token_accounts.session_seq
    ORDER BY b.reason = '' AND b.tokens > 0 DESC, b.tokens DESC LIMIT 1
);
"""

_VERSION_7 = """
CREATE INDEX sessions_kept ON sessions (seq) WHERE ending IS NOT NULL AND deleted_at IS NULL;
"""

_VERSION_8 = """
-- The highest attempt of a group's sessions, so that the next one is found without reading the sessions of the task.
ALTER TABLE task_groups ADD COLUMN last_attempt INTEGER NOT NULL DEFAULT 0;
UPDATE task_groups SET last_attempt = (SELECT coalesce(max(attempt), 0) FROM sessions s WHERE s.group_seq = task_groups.seq);
CREATE INDEX groups_tried ON task_groups (task_id, last_attempt) WHERE dropped_at IS NULL;
"""

_VERSION_9 = """
-- Which arrays of the row are zstd frames; its messages and tools, where they are one (packing.py). Rows from before have none.
ALTER TABLE recordings ADD COLUMN packed TEXT NOT NULL DEFAULT '';
ALTER TABLE recordings ADD COLUMN texts BLOB;
"""

_VERSION_10 = """
-- Set when a session ends well in a run whose reward source has yet to reward it; cleared by its reward, or its drop.
ALTER TABLE sessions ADD COLUMN awaits_reward_since REAL;
CREATE INDEX sessions_awaiting ON sessions (awaits_reward_since) WHERE awaits_reward_since IS NOT NULL;
"""

MIGRATIONS = (
    _VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4, _VERSION_5, _VERSION_6, _VERSION_7, _VERSION_8, _VERSION_9, _VERSION_10,
)  # fmt: skip
VERSION = len(MIGRATIONS)


def migrate(connection: Connection, engine: Engine) -> None:
    """Bring the database to VERSION in one transaction. One that is already there is only looked at."""
    if _layout(connection, engine) == VERSION:
        return
    engine.begin_write(connection)
    layout = _layout(connection, engine)  # another process may have done it meanwhile
    statements = [
        statement.strip() for script in MIGRATIONS[layout:] for statement in script.split(";\n") if statement.strip()
    ]
    engine.migrate(connection, statements, VERSION)
    connection.execute("COMMIT")


def check_current(connection: Connection, engine: Engine) -> None:
    """Raises StoreError for a store that only `migrate` makes readable."""
    layout = _layout(connection, engine)
    if layout < VERSION:
        raise StoreError(
            f"the store {engine.name} has schema version {layout}, this release reads {VERSION}; `areal dashboard --run` brings a "
            "store up to date when it opens it (not beside a run of the earlier release), or read it with that release"
        )


def _layout(connection: Connection, engine: Engine) -> int:
    layout = engine.layout(connection)
    if layout > VERSION:
        raise StoreError(
            f"the store {engine.name} has schema version {layout}, this release knows up to {VERSION}; "
            "upgrade areal, or start a new run folder"
        )
    return layout
