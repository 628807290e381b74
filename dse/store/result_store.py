"""Durable store of results: one table, the single source of truth.

A result is looked up by its key, the content hash of the design and of its context (backend, version, parameters), and
is recorded once. Every row carries a checksum; a row that does not fit it is put into quarantine and counts as absent.
Other tables hold the studies that requested the results, and the leases of points in flight.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    any_,
    bindparam,
    delete,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from dse.backend import STATUSES, Result, Results, Status
from dse.errors import hidden
from dse.errors.parsing import parse_json
from dse.store.contract import Context, Evaluated, StoredResults, key_bytes
from dse.store.database import PATIENCE_S, Blob, Database, StoreError, check_plain, number_file, numbered, reader
from dse.store.result_rows import (
    BULK_INSERT,
    BULK_SELECT,
    BULK_SIZE,
    as_bytes,
    group_alike,
    is_intact,
    results_of_rows,
    with_key,
)
from dse.values import Keys

if TYPE_CHECKING:
    from sqlalchemy import Connection

SCHEMA = 2
"""Version of the tables and of what a key is a hash of, raised by every change of them."""
FORMER_SCHEMA = 1
"""The version whose keys `dse.study.rebase` carries over."""
# below SQLite's limit of 32,766 parameters
_CHUNK = 4096  # keys per statement

_tables = MetaData()
contexts = Table(
    "contexts",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("backend", String, nullable=False),
    Column("version", String, nullable=False),
    Column("parameters", String, nullable=False),
    Column("metrics", String, nullable=False),  # JSON list: names of the numbers in a result's `metrics`
)
studies = Table(
    "studies",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("state", String, nullable=False),  # running or finished
    Column("parent", Integer),  # the study it was forked from
    Column("before", Integer, nullable=False),  # results it had when it was last accepted under another question
    Column("context", Integer, nullable=False),
    Column("accepted", String, nullable=False),  # JSON list: other contexts whose results it takes
    Column("command", String, nullable=False),  # JSON list of overrides
    Column("asked", String, nullable=False),  # JSON: path -> value of all that makes it this study and no other
    Column("request", String, nullable=False),  # JSON: the composed configuration
    Column("provenance", String, nullable=False),  # JSON
    Column("recalled", String, nullable=False),  # JSON: study -> how many of its results were taken
)
results = Table(
    "results",
    _tables,
    Column("key", Blob(16), primary_key=True),
    Column("context", Integer, nullable=False),
    Column("study", Integer, nullable=False),  # that had it evaluated
    Column("status", SmallInteger, nullable=False),  # place in dse.backend.STATUSES
    Column("engine", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("point", String, nullable=False),  # JSON: scenario and searched values
    Column("metrics", Blob, nullable=False),  # float64, little-endian; empty unless ok
    Column("checksum", Blob(8), nullable=False),
    sqlite_with_rowid=False,  # clustered by key: no second index
)
owners = Table(
    "owners",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("study", Integer, nullable=False),
    Column("host", String, nullable=False),
    Column("boot", String, nullable=False),
    Column("space", String, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started", Integer, nullable=False),
    Column("beat", Integer, nullable=False),  # counts up while it lives, for those who cannot look at its pid
)
leases = Table(
    "leases",
    _tables,
    Column("name", Blob(16), primary_key=True),  # sum of the keys of the points
    Column("owner", Integer, nullable=False),
    Column("size", Integer, nullable=False),  # number of points
    sqlite_with_rowid=False,
)
about = Table("about", _tables, Column("schema", Integer, primary_key=True, autoincrement=False))
quarantine = Table(
    "quarantine",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("key", Blob, nullable=False),
    Column("held", String, nullable=False),  # the row as it was read
)


Insert = tuple[str, Any]
"""A statement of the driver, and its parameters."""


class Store:
    """The tables of results in a database. Raises dse.store.database.StoreError if it cannot be used."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, schemas: Collection[int] = (SCHEMA,)) -> None:
        self.url, self.patience_s = url, patience_s
        self.database = Database(url, _tables, keyed=results, patience_s=patience_s)
        self._insert = str(self.insert_statement(results).compile(dialect=self.database.dialect))  # for the driver
        self._contexts: dict[int, Context] = {}
        self._check_schema(schemas)

    def _check_schema(self, schemas: Collection[int]) -> None:
        """Number new tables, and refuse those of a version that is none of `schemas`."""

        def work(connection: Connection) -> int:
            inspector = inspect(connection)
            for table in _tables.tables.values():  # a database from before tables had a number
                if {column["name"] for column in inspector.get_columns(table.name)} != set(table.columns.keys()):
                    return 0
            version = schema_of(connection)
            connection.execute(self.insert_statement(about), {"schema": version})
            if numbered(connection) != version:
                number_file(connection, version)
            return version

        if (version := self.database.write(work)) not in schemas:
            raise wrong_schema(version, self.url)

    def insert_statement(self, table: Table) -> Any:
        """Build the statement that inserts rows into a table, except those whose key is present."""
        make: Any = sqlite.insert if self.database.dialect.name == "sqlite" else postgresql.insert
        return make(table).on_conflict_do_nothing()  # who was first stands

    @functools.cached_property
    def lease_statement(self) -> Any:
        """Statement that takes free leases; it returns the name and the owner of each, who may be another."""
        insert_into: Any = sqlite.insert if self.database.dialect.name == "sqlite" else postgresql.insert
        same = insert_into(leases).on_conflict_do_update(index_elements=["name"], set_={"owner": leases.c.owner})
        return same.returning(leases.c.name, leases.c.owner)  # of held leases, too: `same` sets what they hold

    def number(self, context: Context) -> int:
        """Return the number of a context, which is added if it is new."""
        values = {**vars(context), "metrics": json.dumps(context.metrics)}  # canonical: equal texts are equal contexts
        same = [contexts.c[name] == value for name, value in values.items()]

        def work(connection: Connection) -> int:
            row_id = connection.execute(select(contexts.c.id).where(*same)).scalar()
            if row_id is None:
                row_id = connection.execute(insert(contexts).values(values).returning(contexts.c.id)).scalar_one()
            return int(row_id)

        return self.database.write(work)

    def context(self, number: int) -> Context | None:
        """Return the context of a number, None if there is none."""
        if number not in self._contexts:  # contexts never change
            query = select(contexts).where(contexts.c.id == number)
            row = self.database.read(lambda connection: connection.execute(query).first())
            if row is None:
                return None
            metrics = tuple(parse_json(row.metrics, "metrics"))
            self._contexts[number] = Context(row.backend, row.version, row.parameters, metrics)
        return self._contexts[number]

    def count(self, study: int, made_in: Collection[int] | None = None) -> int:
        """Count the results that a study evaluated. made_in: in these contexts only."""
        query = select(func.count()).select_from(results).where(results.c.study == study)
        query = query if made_in is None else query.where(results.c.context.in_(sorted(made_in)))
        return int(self.database.read(lambda connection: connection.execute(query).scalar_one()))

    def holds(self, context: int) -> bool:
        """Return whether there are results of a context."""
        query = select(results.c.key).where(results.c.context == context).limit(1)
        return self.database.read(lambda connection: connection.execute(query).first()) is not None

    def find(self, keys: Keys, context: int) -> StoredResults:
        """Look up keys [B, 2] that were made in a context.

        Rows that do not fit their checksum go into quarantine and count as unknown.
        """
        names, made_in = key_bytes(keys), self.context(context)
        assert made_in is not None
        rows = [  # each name once: designs may have equal keys
            row for chunk in chunks(list(dict.fromkeys(names))) for row in self._intact_rows(self._rows(chunk), context)
        ]
        if not rows:
            nothing = Results.all_alike(Result("unsupported"), len(names))  # masked by `known`: any status would do
            return StoredResults(np.zeros(len(names), bool), nothing, np.full(len(names), -1))
        place = {row[0]: index for index, row in enumerate(rows)}
        where = np.array([place.get(name, -1) for name in names], np.intp)  # takes the last row, which `known` masks
        study = np.array([row[2] for row in rows], np.int64)
        return StoredResults(where >= 0, results_of_rows(rows, made_in.metrics).take(where), study[where])

    def _rows(self, names: Sequence[bytes]) -> list[Any]:
        if self.database.dialect.name == "postgresql":  # one parameter for all of them
            is_asked = results.c.key == any_(bindparam(None, names, postgresql.ARRAY(Blob)))
            return self.database.read(lambda connection: list(connection.execute(select(results).where(is_asked))))
        asked = {"size": len(names), "keys": b"".join(names)}
        return self.database.read(lambda connection: list(connection.exec_driver_sql(BULK_SELECT, asked)))

    def _intact_rows(self, rows: Sequence[Any], context: int | None = None) -> list[Any]:
        """Return the rows that fit their checksums, and the context if one is given; the others go into quarantine.

        Those are read again first, as a row that changed on its way here may be intact in the database.
        """
        damaged = [row for row in rows if not is_intact(row, context)]
        if not damaged:
            return list(rows)
        names = [row[0] for row in damaged]

        def work(connection: Connection) -> list[Any]:
            again = list(connection.execute(select(results).where(results.c.key.in_(names))))
            bad = [row for row in again if not is_intact(row, context)]
            if bad:
                records = [{"key": as_bytes(row[0]), "held": ascii(tuple(row))} for row in bad]
                connection.execute(insert(quarantine), records)  # kept for a look by hand
                connection.execute(delete(results).where(results.c.key.in_([row[0] for row in bad])))
            return [row for row in again if row not in bad]  # those were damaged on the way only

        return [row for row in rows if row not in damaged] + self.database.write(work)

    def inserts(self, evaluated: Sequence[Evaluated], *, context: int, study: int) -> list[Insert]:
        """Statements that record results of designs that have none yet: made before a transaction takes locks."""
        made_in = self.context(context)
        assert made_in is not None
        bulk, rows, dialect = list[Insert](), list[tuple[Any, ...]](), self.database.dialect.name
        for group in group_alike(evaluated, made_in.metrics, context, study):
            if group.size >= BULK_SIZE[dialect]:
                bulk.append((BULK_INSERT[dialect], group.bulk_insert()))
            else:
                rows += group.rows()
        return [*bulk, (self._insert, rows)] if rows else bulk

    def add(self, connection: Connection, inserts: Sequence[Insert]) -> int:
        """Record results, and return how many were new. In the transaction of `connection`."""
        return sum(connection.exec_driver_sql(*insert).rowcount for insert in inserts)

    def change(self, statement: Any) -> None:
        """Execute a statement that changes one row. Raises StoreError, without a change, if it matches more or none."""

        def work(connection: Connection) -> None:
            if (count := connection.execute(statement).rowcount) != 1:
                message = f"{self.database}: {count} rows were changed where 1 was to be; nothing was changed"
                raise StoreError(f"{message}: look with python -m dse store check")  # which rolls the change back

        self.database.write(work)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete results by their keys."""
        statements = [delete(results).where(results.c.key.in_(chunk)) for chunk in chunks(names)]
        self.database.write(lambda connection: [connection.execute(statement) for statement in statements])

    def forget(self, status: Status, context: int) -> int:
        """Delete results of a status that were made in a context, and return their number."""
        gone = delete(results).where(results.c.status == STATUSES.index(status), results.c.context == context)
        return self.database.write(lambda connection: connection.execute(gone).rowcount)

    def check(self) -> tuple[int, int]:
        """Verify every row: (number of intact rows, number of damaged rows, which go into quarantine)."""
        fine = bad = 0
        for rows in self.pages():
            intact = len(self._intact_rows(rows))
            fine, bad = fine + intact, bad + len(rows) - intact
        return fine, bad

    def pages(self) -> Iterator[list[Any]]:
        """Read all rows of results in the order of their keys, as they stand, up to 65,536 at a time."""
        query, last = select(results).order_by(results.c.key).limit(1 << 16), b""
        while rows := self._page(query.where(results.c.key > last)):  # not by offset: others may insert meanwhile
            yield rows
            last = max(row[0] for row in rows)  # a damaged table may be out of order

    def _page(self, query: Any) -> list[Any]:
        return self.database.read(lambda connection: list(connection.execute(query)))

    def rebase(self, keys: Mapping[bytes, bytes]) -> None:
        """Record results under other keys, former -> present, and the present version: one transaction.

        Where the present key has a result, that one stands.
        """

        def work(connection: Connection) -> None:
            self.database.exclude(connection)  # nobody may record under former keys meanwhile
            for names in chunks(list(keys)):
                rows = connection.execute(select(results).where(results.c.key.in_(names))).all()
                if rows:
                    connection.exec_driver_sql(self._insert, [with_key(row, keys[row[0]]) for row in rows])
                connection.execute(delete(results).where(results.c.key.in_(names)))
            connection.execute(delete(about))
            connection.execute(insert(about), {"schema": SCHEMA})
            number_file(connection, SCHEMA)

        self.database.write(work)


def schema_of(connection: Connection) -> int:
    """The version of a database; of one whose number was lost, the former one if it holds results."""
    if versions := list(connection.execute(select(about.c.schema)).scalars()):
        return int(max(versions))
    if version := numbered(connection):  # the table's only page was damaged
        return version
    # only the former version had no number
    return SCHEMA if connection.execute(select(results.c.key).limit(1)).first() is None else FORMER_SCHEMA


def wrong_schema(version: int, url: str) -> StoreError:
    """The refusal of a database of another version, with the way out."""
    place = hidden(url)
    if version == FORMER_SCHEMA:
        rule = f"{place} holds results under former names of knobs"
        return StoreError(f"{rule}; carry them over, once: python -m dse store rebase store={place}")
    rule = f"{place} is laid out for another version of dse ({version}, not {SCHEMA})"
    return StoreError(f"{rule}; choose another output_dir or store.url")


def recorded_keys(url: str) -> Iterator[Keys]:
    """Read the keys [<= 65,536, 2] of all results of a store; nothing is created or written.

    Raises StoreError if it cannot be read.
    """
    engine = reader(url)
    if engine is None:
        return
    try:
        # a million keys need not be in memory at once
        with engine.connect().execution_options(stream_results=True) as connection:
            check_plain(connection, _tables, hidden(url))
            if (version := schema_of(connection)) != SCHEMA:
                raise wrong_schema(version, url)
            for part in connection.execute(select(results.c.key)).partitions(1 << 16):
                data = b"".join(key for (key,) in part if isinstance(key, bytes) and len(key) == 16)
                yield np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, 2)  # bytes were written big-endian
    except DBAPIError as error:
        raise StoreError(f"{hidden(url)} cannot be read ({error.orig}): look with python -m dse store check") from error
    finally:
        engine.dispose()


def chunks(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split names into parts for one statement each."""
    for start in range(0, len(names), _CHUNK):
        yield names[start : start + _CHUNK]
