"""Connections to PostgreSQL whose every wait has a deadline.

The driver waits for a silent server without a limit, and no setting of the server or of TCP helps where the machine
still answers and the server does not (stopped, or at the other end of a connection that one side has forgotten). So
every wait ends at a deadline set here, on sockets of any kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event

from dse.errors import not_installed

try:
    import psycopg
except ImportError:
    raise not_installed("postgresql", "psycopg", "postgresql") from None

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from sqlalchemy import Connection, Dialect, Engine

T = TypeVar("T")

ANSWER_S = 60.0
"""Time to wait for an answer where there is no deadline."""

_deadline: ContextVar[float] = ContextVar("deadline")  # of this thread

# in s unless noted: a dead peer is noticed in 10 + 3 * 5 s
_SETTINGS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms that sent bytes may stay unacknowledged
    "prepare_threshold": None,  # preparing a statement takes one more round trip
}


class WatchedConnection(psycopg.Connection[Any]):
    """A connection that closes and raises an OperationalError if an answer is missing at the deadline."""

    def __del__(self, *_: Any) -> None:
        """Close it, since a connection that broke during its setup has no pool to do so."""
        if hasattr(self, "pgconn"):
            self.pgconn.finish()

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Wait for the server's answer. Raises psycopg.OperationalError at the deadline."""
        began = time.monotonic()
        until = _deadline.get(began + ANSWER_S)
        limit = max(0.01, until - began)  # a deadline in the past still reads an answer that is there
        try:
            return super().wait(gen, interval, limit if timeout is None else min(limit, timeout))
        except psycopg.OperationalError as error:
            if self.closed or time.monotonic() < began + limit:
                raise
            self.pgconn.finish()  # a late answer must not be taken for that of the next statement
            raise psycopg.OperationalError(f"no answer for {limit:.3g} s") from error


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Set a deadline (monotonic clock) for all answers inside; outside, each answer may take `ANSWER_S`."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def watch(engine: Engine | type[Engine]) -> None:
    """Make an engine, or all engines, use such connections; settings in a URL take precedence."""
    if not event.contains(engine, "do_connect", _connect):  # once for each engine
        event.listen(engine, "do_connect", _connect)


def _connect(dialect: Dialect, _record: Any, words: Any, settings: dict[str, Any]) -> WatchedConnection | None:
    # None: SQLAlchemy connects by itself
    return WatchedConnection.connect(*words, **{**_SETTINGS, **settings}) if dialect.driver == "psycopg" else None


def foreign(connection: Connection, names: list[str]) -> list[str]:
    """List triggers and rules on the tables of these names, and views in their place."""
    query = """
        SELECT 'trigger ' || tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid
         WHERE NOT tgisinternal AND relname = ANY(%(names)s) AND pg_table_is_visible(c.oid)
        UNION ALL
        SELECT 'rule ' || rulename FROM pg_rewrite JOIN pg_class c ON c.oid = ev_class
         WHERE relkind IN ('r', 'p') AND relname = ANY(%(names)s) AND pg_table_is_visible(c.oid)
        UNION ALL
        SELECT 'view ' || relname FROM pg_class c
         WHERE relkind NOT IN ('r', 'p') AND relname = ANY(%(names)s) AND pg_table_is_visible(c.oid)
        """
    return [name for (name,) in connection.exec_driver_sql(query, {"names": names})]
