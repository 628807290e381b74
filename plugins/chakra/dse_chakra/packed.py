"""Packed files of profiles and traces, told by their first bytes; what they unpack to is bounded."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

from dse.errors import ConfigError, Problem
from dse.files import open_plain_file

_READ_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
MOST_STREAMED = 1 << 36
"""Of a file that is read part by part, such as a profile."""
MOST_UNPACKED = 1 << 38
"""Bytes that a packed file may hold: what unpacks to more is no profile."""
MOST_RATIO = 300
"""Bytes for each packed one, past `FREELY_UNPACKED`: profiles have 10 to 50, a file made to fill memory has 1,000."""
FREELY_UNPACKED = 1 << 26
"""Bytes that any packed file may hold."""


class TooLargeError(EOFError):
    """A packed file unpacks to more than any profile does. Its text is the name of its packer."""


class DamagedError(EOFError):
    """A packed file is cut off or damaged. Its text is the name of its packer."""


DAMAGED = (EOFError,)
"""Raised by reading a packed file that is cut off or damaged, or that unpacks to too much (`TooLargeError`)."""
_LAYERS = 3
"""Packers around one another, as in a zip that holds a gzip."""
_MOST_WINDOW = 1 << 28
"""Bytes of memory that an xz may ask for to be unpacked; `xz -9` asks for 65 MB."""
# the directory of a zip is read into memory before any member
_MOST_MEMBERS = 1000
_ZIP_TAIL = 22 + (1 << 16)  # bytes from which the end of a zip's directory is found
_PACKERS: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of packed files, and their packers."""
_ARCHIVES: Mapping[bytes, tuple[str, str]] = {
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
    b"Rar!": ("RAR", "unrar x"),
    b"\x1f\x9d": ("compress", "uncompress"),
    b"PK\x05\x06": ("zip, and holds nothing", "unzip"),
}
"""First bytes of archives that are not read: what they are, and the command that unpacks them."""
_TAR_AT, _TAR = 257, b"ustar"  # a tar's mark is not at its start


def loss(error: Exception) -> str:
    """The part of a file that is dropped for an error of `DAMAGED`."""
    if isinstance(error, TooLargeError):
        return f"the rest of a {error} that unpacks to more than a profile holds"
    return f"the rest of a {error} that is cut off or damaged"


@contextmanager
def open_packed(path: Path) -> Iterator[tuple[BufferedReader, BufferedReader]]:
    """The bytes that a file holds, unpacked, and the file itself, whose place tells progress. Raises ConfigError.

    Its first bytes tell the packer, whatever it is called: gzip, zip with one member, xz, bzip2, zstd or lz4, also one
    inside another.
    """
    with open_plain_file(path, "profile", most=MOST_STREAMED, way_out="name the file of a profile") as file:
        layer = file
        for _ in range(_LAYERS):
            head = _first_bytes(layer)
            packer = next((packer for mark, packer in _PACKERS.items() if head.startswith(mark)), None)
            if packer is None:
                break  # not packed, or not any more
            opened = _zip_member(layer, path) if packer == "zip" else _stream(packer, layer)
            layer = BufferedReader(_UnpackedStream(opened, packer, file), _READ_BYTES)
        _refuse_archive(_first_bytes(layer), path)  # after unpacking: a tar.gz holds a tar
        yield layer, file


def _first_bytes(layer: BufferedReader) -> bytes:
    """The first bytes of what is packed or not; none where they cannot be unpacked, which reading then tells."""
    try:
        # peeking leaves the bytes for the reader
        return layer.peek(_TAR_AT + len(_TAR))
    except EOFError:
        return b""


def packer_of(path: Path) -> str:
    """The packer of a file by its first bytes, "" for one that is not packed. Raises ConfigError."""
    with open_plain_file(path, "profile", most=MOST_STREAMED, way_out="name the file of a profile") as file:
        head = file.peek(_TAR_AT)
    return next((packer for mark, packer in _PACKERS.items() if head.startswith(mark)), "")


def _refuse_archive(head: bytes, path: Path) -> None:
    for mark, (name, command) in _ARCHIVES.items():
        if head.startswith(mark):
            raise ConfigError([Problem("profile", f"is packed by {name}", str(path), f"unpack it first: {command}")])
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        way = f"unpack it first: tar xf {path.name}"
        raise ConfigError([Problem("profile", "is a tar, an archive of files", str(path), way)])


def _stream(packer: str, layer: BufferedReader) -> IO[bytes]:
    """The bytes that a packed one holds."""
    if packer == "gzip":
        return gzip.GzipFile(fileobj=layer, mode="rb")  # type: ignore[return-value]
    if packer in ("zstd", "lz4"):
        import pyarrow as pa  # the standard library has neither

        return pa.CompressedInputStream(pa.PythonFile(layer, "r"), packer)  # type: ignore[no-any-return]
    if packer == "xz":
        return _Frames(layer, lambda: lzma.LZMADecompressor(memlimit=_MOST_WINDOW))  # type: ignore[return-value]
    return _Frames(layer, bz2.BZ2Decompressor)  # type: ignore[return-value]


class _Frames:
    """The bytes of compressed frames, one after another, of xz or bzip2."""

    def __init__(self, packed: BufferedReader, frame: Callable[[], Any]) -> None:
        self._packed, self._new, self._frame, self._begun = packed, frame, frame(), False

    def read(self, size: int) -> bytes:
        """At most `size` unpacked bytes, none at the end. Raises EOFError where the last frame is cut off."""
        fresh = b""
        while True:
            if self._frame.eof:
                # padding between frames
                fresh, self._frame, self._begun = self._frame.unused_data.lstrip(b"\0"), self._new(), False
            if not fresh and self._frame.needs_input:
                fresh = self._packed.read1(_HEAD_BYTES)
            if not fresh and self._frame.needs_input:
                if self._begun:
                    raise EOFError
                return b""
            data: bytes = self._frame.decompress(fresh, size)
            fresh, self._begun = b"", True
            if data:
                return data


def _zip_member(layer: BufferedReader, path: Path) -> IO[bytes]:
    """The bytes of the only file of a zip. Raises ConfigError."""

    def refused(rule: str, way: str = f"unpack it first: unzip {path.name}") -> ConfigError:
        return ConfigError([Problem("profile", rule, str(path), way)])

    if not layer.seekable():  # a zip's directory is at its end
        raise refused("is a zip inside another packed file")
    try:
        # the count of members, from the record at the end, before the directory is parsed
        layer.seek(max(layer.seek(0, os.SEEK_END) - _ZIP_TAIL, 0))
        end = layer.read().rpartition(b"PK\x05\x06")
        if end[1] and int.from_bytes(end[2][6:8], "little") > _MOST_MEMBERS:
            raise refused(f"is a zip of more than {_MOST_MEMBERS} files")
        archive = zipfile.ZipFile(layer)
        members = [entry for entry in archive.infolist() if not entry.is_dir() and _is_shown(entry.filename)]
        if len(members) != 1:
            names = ", ".join(ascii(entry.filename[:80]) for entry in members[:5]) + (", ..." if members[5:] else "")
            way = "unpack it, and name one of them, or the folder where they are the ranks of one run"
            raise refused(f"is a zip of {len(members)} files: {names}" if members else "is a zip without a file", way)
        return archive.open(members[0])
    except (zipfile.BadZipFile, EOFError, struct.error):
        raise refused("is a zip that is cut off or damaged", "fetch it again") from None
    except (RuntimeError, NotImplementedError, ValueError) as error:  # with a password; by another method
        raise refused(f"is a zip that cannot be unpacked here: {error}") from None


def _is_shown(name: str) -> bool:
    """True for a file of a zip that is none of the system's own."""
    return not name.startswith("__MACOSX/") and not name.rpartition("/")[2].startswith(".")


class _UnpackedStream(RawIOBase):
    """Unpacked bytes of a stream. Raises `DamagedError`, or `TooLargeError` past what a file may unpack to."""

    def __init__(self, stream: IO[bytes], packer: str, file: BufferedReader) -> None:
        self._stream, self._packer, self._file, self._bytes = stream, packer, file, 0

    def readable(self) -> bool:
        """See io.RawIOBase.readable."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase.readinto."""
        read = getattr(self._stream, "read1", self._stream.read)  # as much as is there, without waiting for all
        try:
            data: bytes = read(min(len(buffer), _READ_BYTES))
        # of a packer inside: it is an EOFError, but no damage
        except TooLargeError:
            raise
        except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile):
            # every library reports damage by an error of its own
            raise DamagedError(self._packer) from None
        self._bytes += len(data)
        # packed bytes read so far: the ratio is checked on the way
        if self._bytes > min(MOST_UNPACKED, max(FREELY_UNPACKED, MOST_RATIO * self._file.tell())):
            raise TooLargeError(self._packer)
        buffer[: len(data)] = data
        return len(data)
