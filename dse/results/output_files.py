"""Files of an output folder, which may be damaged or somebody else's: plain files, read as data, within limits.

Whatever is wrong with a file is a ConfigError that names it. No link, pipe or device is opened; JSON and YAML have
limits of size, depth and number of values; a table is looked at before it is read, so that a short file cannot stand
for a long one.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel

from dse.errors import Broken, ConfigError, Problem, validate_as
from dse.errors.parsing import parse_json, parse_yaml

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BYTES = 1 << 24
"""Size of a JSON or YAML file."""
MOST_VALUES = 1_000_000
"""Values in a JSON file."""
_MOST_FOOTER = 1 << 24  # bytes of what a table says of itself
_MOST_COLUMNS = 10_000
_FREE_CELLS, _CELLS_PER_BYTE = 10_000_000, 16  # cells of a table: some, and more in a longer file (keys are hashes)
_FREE_TEXT, _TEXT_PER_BYTE = 1 << 29, 64  # bytes of text that is read from a table, likewise
_CODECS = ("SNAPPY", "UNCOMPRESSED")  # the ones that are written; others make a gigabyte of a kilobyte
_FOREIGN_CODECS = (*_CODECS, "ZSTD", "GZIP", "BROTLI", "LZ4", "LZ4_RAW")  # of tables whose pages are looked at before
_MOST_UNPACKED = 1 << 29  # bytes of all pages of such a table
_WAY = "run the study again: what is stored is not evaluated again, and the folder is written anew"


def file_error(path: Path, rule: str, value: object = None, way_out: str = _WAY) -> ConfigError:
    """The error that names a file and the rule it breaks."""
    return ConfigError([Problem(str(path), rule, value, way_out)])


def exists(path: Path) -> bool:
    """True if a folder has an entry of this name, whatever it is: reading tells what is wrong with it."""
    return os.path.lexists(path)


@contextmanager
def open_untrusted(path: Path) -> Iterator[IO[bytes]]:
    """A plain file, opened for reading without waiting. Raises ConfigError for anything else, OSError."""
    try:
        # no link, no waiting for a pipe
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        rule = "is a link" if path.is_symlink() else "is not there" if not exists(path) else "is no plain file"
        raise file_error(path, rule) from error
    with os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else _close_and_refuse(path, handle) as file:
        yield file


def _close_and_refuse(path: Path, handle: int) -> NoReturn:
    os.close(handle)
    raise file_error(path, "is no plain file")


def text(path: Path) -> str:
    """A whole file of UTF-8. Raises ConfigError, also for one of more than `MOST_BYTES`."""
    with open_untrusted(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise file_error(path, f"is larger than {MOST_BYTES} bytes")
    with _understood(path, "text in UTF-8"):
        return data.decode("utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ConfigError."""
    content = text(path)
    return _of_folder(lambda: parse_json(content, str(path), most_values=MOST_VALUES))


def read_yaml(path: Path) -> Any:
    """Read a YAML file without aliases and tags. Raises ConfigError."""
    content = text(path)
    return _of_folder(lambda: parse_yaml(content, str(path)))


def _of_folder(parse: Callable[[], Any]) -> Any:
    """Parse a file; what the parser refuses is refused with the way out of a damaged folder."""
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(replace(problem, way_out=problem.way_out or _WAY) for problem in error.problems) from None


def read_as(kind: type[BaseModel], path: Path, tree: Any) -> dict[str, Any]:
    """A tree that was read from a file and has the shape of `kind`, with its defaults. Raises ConfigError."""
    model = validate_as(kind, tree, path=str(path))
    return {**tree, **model.model_dump()}


def plain_folder(path: Path) -> Path:
    """A folder to write into, made if need be. Raises ConfigError where it is a link: it may lead anywhere. OSError."""
    if not exists(path):
        path.mkdir()
    if path.is_symlink() or not path.is_dir():
        raise file_error(path, "is no plain folder, and nothing is written through a link", way_out="remove it")
    return path


@contextmanager
def _understood(path: Path, kind: str) -> Iterator[None]:
    """Whatever a parser makes of the contents of a file, told as one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # parsers raise types without a common base
        message = " ".join(str(error).split())[:200]
        raise file_error(path, f"is not {kind}: {type(error).__name__}{': ' * bool(message)}{message}") from error


# ---------------------------------------------------------------- tables


class ParquetTable:
    """An open Parquet table of flat columns of numbers, truth values and texts, as `pyarrow` reads it, part by part.

    names: of the columns. kinds: what each may hold, of `text`, `number` and `truth`. check: told of every part that is
    read.

    Raises ConfigError where a part is not what the table says of itself, or is too much.
    """

    def __init__(self, path: Path, file: Any, schema: pa.Schema, *, kinds: Mapping[str, str], size: int) -> None:
        self.path, self.schema, self._file = path, schema, file
        self.num_rows, self.num_groups = int(file.metadata.num_rows), int(file.num_row_groups)
        self.names, self.kinds = tuple(kinds), kinds
        self.check: Callable[[pa.Table], object] = lambda part: None
        self._text_left = _FREE_TEXT + _TEXT_PER_BYTE * size  # for all that is read of this file

    def group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one row group, with all columns or some."""
        import pyarrow as pa

        wanted = list(self.names if columns is None else dict.fromkeys(columns))
        if absent := [name for name in wanted if name not in self.names]:
            raise file_error(self.path, f"has no column {absent[0]}")
        with _understood(self.path, "valid Parquet"):
            coded = self._file.read_row_group(number, columns=wanted).select(wanted)
            self._text_left -= sum(map(_text_bytes, coded.columns))  # before texts are made of the codes
            if self._text_left < 0:
                raise file_error(self.path, "holds more text than a table of its size can")
            fields = [self.schema.field(name) for name in wanted]
            rows = coded.cast(pa.schema(fields, metadata=self.schema.metadata))
            rows.validate(full=True)  # indices and offsets of a damaged file may lead anywhere
        self.check(rows)
        return rows

    def groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The row groups in their order."""
        return (self.group(number, columns) for number in range(self.num_groups))

    def whole(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows, with all columns or some."""
        import pyarrow as pa

        wanted = list(self.names if columns is None else dict.fromkeys(columns))
        fields = [self.schema.field(name) for name in wanted if name in self.names]
        empty = pa.schema(fields, metadata=self.schema.metadata).empty_table()
        return pa.concat_tables([empty, *self.groups(columns)])


@contextmanager
def table(path: Path, *, foreign: bool = False) -> Iterator[ParquetTable]:
    """A Parquet table that may be read. foreign: another program wrote it, packed in any way. Raises ConfigError for
    one that is damaged or a bomb.
    """
    import pyarrow.parquet as pq

    from dse.results.parquet_pages import unpacked_bytes

    with open_untrusted(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        _check_footer(path, handle, size)
        with _understood(path, "Parquet"):
            # limits what a footer may make the reader allocate
            first = pq.ParquetFile(handle, thrift_container_size_limit=MOST_VALUES, pre_buffer=False)
            _check_rows(path, first.metadata, size)
            _open_columns(first)
            _check_columns(path, first.metadata, _FOREIGN_CODECS if foreign else _CODECS)
            if foreign and unpacked_bytes(handle, first.metadata) > _MOST_UNPACKED:
                raise file_error(path, f"takes over {_MOST_UNPACKED:,} bytes once it is unpacked")
            schema = first.schema_arrow
            kinds = {name: _kinds(schema.field(name).type) for name in schema.names}
            texts = [name for name in kinds if "text" in kinds[name]]
            # As codes into the distinct texts, so that what they take is known before a long column is made of them.
            coded = pq.ParquetFile(handle, metadata=first.metadata, read_dictionary=texts, pre_buffer=False)
        if len(set(schema.names)) < len(schema.names):
            raise file_error(path, "has two columns of one name")
        for name in kinds:
            if not kinds[name]:
                raise file_error(path, f"has a column of {schema.field(name).type}: {name}")
        yield ParquetTable(path, coded, schema, kinds=kinds, size=size)


def _check_footer(path: Path, handle: IO[bytes], size: int) -> None:
    """The end of a file must be that of a table, with a footer that may be read."""
    if size < 12:  # magic number, footer's length, magic number again
        raise file_error(path, "is not Parquet: it is too short")
    handle.seek(-8, os.SEEK_END)
    end = handle.read(8)
    if end[4:] != b"PAR1" or int.from_bytes(end[:4], "little") > min(_MOST_FOOTER, size):
        raise file_error(path, "is not Parquet: it was cut short or overwritten")


def _check_rows(path: Path, metadata: Any, size: int) -> None:
    """Check that the numbers of rows and columns of a table agree with its size, and are within limits."""
    columns, groups = metadata.num_columns, [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    cells, most = metadata.num_rows * columns, _FREE_CELLS + _CELLS_PER_BYTE * size
    if columns > _MOST_COLUMNS or cells > most or columns * len(groups) > MOST_VALUES:
        raise file_error(path, f"claims {metadata.num_rows:,} rows of {columns:,} columns, in a file of {size:,} bytes")
    # rows of lists have no bound that the footer tells
    if any(metadata.schema.column(number).max_repetition_level for number in range(columns)):
        raise file_error(path, "has a column of lists")
    if min([0, metadata.num_rows, *(group.num_rows for group in groups)]) < 0:
        raise file_error(path, "claims a negative number of rows")
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        raise file_error(path, "contradicts itself on its number of rows")


def _open_columns(file: Any) -> None:
    """Open every column, and read nothing: damage that raises here ends the process in pyarrow's `column` (25.0)."""
    groups, columns = range(file.metadata.num_row_groups), range(file.metadata.num_columns)
    if columns:  # or the batches of no columns would be counted: rows divided by 0
        no_rows = file.reader.iter_batches(0, row_groups=list(groups), column_indices=list(columns), use_threads=False)
        next(no_rows, None)


def _check_columns(path: Path, metadata: Any, codecs: Sequence[str]) -> None:
    """Check that the columns of a table are packed by one of some codecs, and as long as their rows say."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        for number in range(metadata.num_columns):
            chunk = group.column(number)
            if chunk.compression not in codecs:
                raise file_error(path, f"is compressed by {chunk.compression}, and only {', '.join(codecs)} is read")
            if chunk.num_values != group.num_rows:
                raise file_error(path, f"contradicts itself on the length of {chunk.path_in_schema}")


def frame(path: Path, rows: pa.Table) -> Any:
    """Rows of a table as a DataFrame, of the types that the table names for pandas. Raises ConfigError."""
    with _understood(path, "a table that pandas wrote"):
        table = rows.to_pandas()
        if list(table.columns) != rows.column_names:
            raise ValueError("its columns are not those it names for pandas")
        return table


def plain(value: Any) -> Any:
    """Convert a value of a table, which may be a scalar of NumPy, to a plain Python value."""
    return value.item() if hasattr(value, "item") else value


def _kinds(column: Any) -> str:
    """Kinds of values in a column of a type: text, number, truth, all of them (it is empty), or none that is known."""
    import pyarrow.types as kinds

    inner = column.value_type if kinds.is_dictionary(column) else column
    if kinds.is_string(inner) or kinds.is_large_string(inner):
        return "text"
    if kinds.is_null(inner):  # a column without any value may be of any kind
        return "text, number, truth"
    if kinds.is_boolean(inner):
        return "number, truth"
    return "number" if kinds.is_integer(inner) or kinds.is_floating(inner) else ""


def _text_bytes(column: Any) -> int:
    """Bytes that a column takes when each row has its own text; at least those of the distinct ones."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if not kinds.is_dictionary(column.type):
        return 0
    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary)
        repeated_bytes = pc.sum(pc.take(lengths, chunk.indices)).as_py() or 0
        total += max(repeated_bytes, pc.sum(lengths).as_py() or 0)  # distinct texts that no row uses take memory, too
    return total


# ---------------------------------------------------------------- commands


Answer = TypeVar("Answer")


def working_on_folders(command: Callable[[Sequence[str]], Answer]) -> Callable[[Sequence[str]], Answer]:
    """A command on output folders, whose files may not fit together in ways that nobody foresaw: that is told, with
    the place in the code where it shows, and is no traceback."""

    @functools.wraps(command)
    def run(words: Sequence[str]) -> Answer:
        try:
            return command(words)
        except (ConfigError, Broken, OSError):
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rule = f"cannot be done: the files of the folder do not fit together ({message}, in {_where(error)})"
            way = "run the study again; if nobody changed the files it is a fault of dse, so please report it"
            raise ConfigError([Problem(" ".join(words), rule, way_out=way)]) from error

    return run


def _where(error: BaseException) -> str:
    """File and line of the last of our own functions that an error came through."""
    our_code = Path(__file__).resolve().parents[2]
    place, trace = "", error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        # a virtual environment may lie in the folder of the code
        if file.is_relative_to(our_code) and "site-packages" not in file.parts:
            place = f"{file.relative_to(our_code)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
