"""Pages of Parquet tables that other programs wrote: counted before they are unpacked."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse.results import output_files
from dse.results.parquet_pages import unpacked_bytes
from tests.support import drawn

CODECS = ("zstd", "gzip", "brotli", "lz4", "snappy", "none")


def written(path: Path, table: pa.Table, **how: object) -> Path:
    pq.write_table(table, path, **how)
    return path


@pytest.mark.parametrize("codec", CODECS)
def test_a_table_of_another_program_is_read_however_it_is_packed(tmp_path: Path, codec: str) -> None:
    table = pa.table({"m": [1, 2, 3], "name": ["a", "b", None], "ms": [0.5, 1.5, 2.5]})
    path = written(tmp_path / "a.parquet", table, compression=codec)
    with output_files.table(path, foreign=True) as read:
        assert [column.to_pylist() for column in read.whole().columns] == [
            column.to_pylist() for column in table.columns
        ]


@pytest.mark.parametrize("codec", CODECS[:4])
def test_a_table_of_ours_is_packed_as_we_pack(tmp_path: Path, codec: str) -> None:
    path = written(tmp_path / "a.parquet", pa.table({"m": [1]}), compression=codec)
    with pytest.raises(ConfigError, match="is compressed by"), output_files.table(path):
        pass


@pytest.mark.parametrize("codec", CODECS[:4])
def test_a_short_file_that_stands_for_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(output_files, "_MOST_UNPACKED", 1 << 20)
    table = pa.table({"zero": pa.array([0.0]).take(pa.array([0] * 500_000))})
    path = written(tmp_path / "a.parquet", table, compression=codec, use_dictionary=False)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(ConfigError, match="once it is unpacked"), output_files.table(path, foreign=True):
        pass


@drawn(30)
@given(
    st.integers(1, 3000), st.sampled_from(CODECS), st.booleans(), st.sampled_from(["1.0", "2.0"]), st.integers(50, 4000)
)
def test_pages_are_as_long_as_the_footer_of_an_honest_file_says(
    tmp_path_factory: pytest.TempPathFactory, rows: int, codec: str, coded: bool, version: str, page: int
) -> None:
    table = pa.table({"number": list(range(rows)), "text": [f"name {row % 7}" for row in range(rows)]})
    path = tmp_path_factory.mktemp("pages") / "a.parquet"
    how = {"data_page_version": version, "data_page_size": page, "row_group_size": 700}
    written(path, table, compression=codec, use_dictionary=coded, **how)
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    declared = sum(group.column(number).total_uncompressed_size for group in groups for number in range(2))
    with path.open("rb") as file:
        counted = unpacked_bytes(file, metadata)
    assert 0 < counted <= declared  # which counts headers, too


@drawn(60)
@given(st.integers(4, 400), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_ends_in_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, place: int, damage: bytes
) -> None:
    path = tmp_path_factory.mktemp("pages") / "a.parquet"
    written(path, pa.table({"number": list(range(300))}), compression="zstd")
    metadata = pq.read_metadata(path)
    data = bytearray(path.read_bytes())
    data[place : place + len(damage)] = damage
    path.write_bytes(bytes(data))
    with path.open("rb") as file, suppress(ValueError):
        assert unpacked_bytes(file, metadata) >= 0
