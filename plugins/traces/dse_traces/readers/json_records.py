"""Values of a large JSON by their keys, read piece by piece, so that memory does not grow with the file.

Damage costs what is damaged: after an element of a list that cannot be read, reading goes on at the next one. Control
characters in texts are allowed. Nothing is read twice more than some times, whatever a file holds.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Any

from dse_chakra.packed import DAMAGED, loss

MOST_ELEMENT = 1 << 24
"""Characters of one element."""
_CHUNK = 1 << 18
_OVERLAP = 1 << 12  # characters in which a key, or the begin of an element, is found across two parts
_NEAR_END = 16  # characters: a word or number that ends so near to what was read may go on
_MOST_WASTE = 8  # characters read in vain, for each that was read at all, before attempts are skipped
_FREE_WASTE = 1 << 25
_COST_OF_FAILURE, _COUNTED = 2000, 16  # in characters; an error of `json` counts the lines before it
_LEAP = 1 << 16  # characters that are skipped then
_SPACE = re.compile(r"[\s,]*")
_NEXT = re.compile(r'\{\s*"[^"\\\n]{1,60}"\s*:')
_GOES_ON = re.compile(r"\]\s*,\s*\{")
_NO_NUMBER = re.compile(r"(?<=[:\[,\s])[-+]?(?:nan(?:\([^)\s]*\))?|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
# paths of Windows in names: \\U is no escape of JSON
_NO_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


def text_parts(file: BufferedReader, losses: list[str]) -> Iterator[str]:
    """Yield the text of a file, part by part, as far as it can be unpacked; what is lost is noted in `losses`."""
    try:
        head = file.peek(2)[:2]
        # PowerShell writes UTF-16 when output is redirected
        encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        # incremental: a character may be cut between two parts
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        while data := file.read1(_CHUNK):
            yield decoder.decode(data)
    except DAMAGED as error:
        losses.append(loss(error))


class JsonRecords:
    """Elements of the lists, and other values, that stand under some keys, in the order of the text.

    keys: key -> names, one of which any element of its list has; none where it need not. bare: the key of the elements
    of a text that is a list. worth: what a damaged element must hold to be mended where that is possible.

    damaged, mended: how many elements could not be read, or were mended. lost, characters: of the text. cut: whether
    the text ends before its JSON does. met: keys that are there.
    """

    def __init__(
        self, parts: Iterator[str], keys: Mapping[str, tuple[str, ...]], *, bare: str = "", worth: str = ""
    ) -> None:
        self._parts, self._keys, self._bare = parts, keys, bare
        self._worth = re.compile(worth, re.IGNORECASE) if worth else None
        self._key = re.compile(f'"({"|".join(map(re.escape, keys))})"' + r"\s*:\s*(?=\S)")
        # not strict: control characters in texts are accepted
        self._scan: Any = json.JSONDecoder(strict=False).raw_decode
        # _base: characters before the buffer; _place: where reading stands inside of it
        self._buffer, self._base, self._place, self._waste, self._last = "", 0, 0, 0, ""
        self.damaged = self.mended = self.lost = self.characters = 0
        self.cut = self._at_end = False
        self.met = set[str]()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, element or value)."""
        if self._bare and self._next_is("["):
            self._place += 1
            self.met.add(self._bare)
            yield from self._elements(self._bare)
        while (key := self._find_key()) is not None:
            if self._buffer[self._place] == "[":
                self._place += 1
                yield from self._elements(key)
            elif (value := self._value()) is not None:
                yield key, value
        # the last character that is no blank: whole documents end with a bracket
        self.cut = self.cut or self._last not in ("}", "]")

    @property
    def share(self) -> float:
        """The share of the text that was lost."""
        return self.lost / self.characters if self.characters else 0.0

    def _more(self) -> bool:
        """True where more text follows, which the buffer then holds from its place on: twice as much at least."""
        # at least as much again as is left: an element that needs more text is parsed log(n) times, not n
        fresh, wanted = list[str](), len(self._buffer) - self._place
        while wanted >= 0 and (part := next(self._parts, None)) is not None:
            fresh.append(part)
            # an empty part counts, so that the loop ends
            wanted -= max(len(part), 1)
        text = "".join(fresh)
        if not text:
            return False
        self.characters += len(text)
        self._last = text.rstrip()[-1:] or self._last
        self._base += self._place
        self._buffer, self._place = self._buffer[self._place :] + text, 0
        return True

    def _next_is(self, mark: str) -> bool:
        """True where the next character that is no blank is a mark."""
        while True:
            self._place = _SPACE.match(self._buffer, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._buffer):
                return self._buffer[self._place] == mark
            if not self._more():
                return False

    def _find_key(self) -> str | None:
        """The next of the keys, with the place at its value; None where there is none."""
        while True:
            if match := self._key.search(self._buffer, self._place):
                self._place = match.end()
                self.met.add(match[1])
                return match[1]
            # a key may lie across two parts: the end of the buffer stays
            self._place = max(self._place, len(self._buffer) - _OVERLAP)
            if not self._more():
                return None

    def _value(self) -> Any:
        """The value at the place; None where it cannot be read."""
        while True:
            try:
                value, self._place = self._scan(self._buffer, self._place)
            except (ValueError, RecursionError) as error:
                if self._is_cut(error) and self._more():
                    continue
                self.damaged, self.lost, self._place = self.damaged + 1, self.lost + 1, self._place + 1
                return None
            return value

    def _elements(self, key: str) -> Iterator[tuple[str, Any]]:
        """Yield the elements of the list in which the place is."""
        while True:
            # a list may end, go on behind the end (merged files), or be at the end of what was read
            if not self._next_is("]"):
                if self._place >= len(self._buffer):
                    self.cut = True
                    return
            # enough text behind the bracket to see whether the list goes on
            elif self._place + _OVERLAP < len(self._buffer) or not self._more():
                if not _GOES_ON.match(self._buffer, self._place):
                    self._place += 1
                    return
            else:
                continue
            try:
                value, self._place = self._scan(self._buffer, self._place)
            except (ValueError, RecursionError) as error:
                if self._is_cut(error) and self._more():
                    continue
                yield from ((key, value) for value in self._resume(key))
                if self._at_end:
                    return
                continue
            yield key, value

    def _is_cut(self, error: Exception) -> bool:
        """True where what could not be read may go on in the text that was not read yet."""
        if len(self._buffer) - self._place > MOST_ELEMENT or not isinstance(error, json.JSONDecodeError):
            # an element beyond the limit is damage, and errors of other kinds do not depend on more text
            return False
        return error.pos >= len(self._buffer) - _NEAR_END or error.msg.startswith("Unterminated string")

    def _resume(self, key: str) -> Iterator[Any]:
        """Yield what can be mended of the element at the place, and the next element; the place is then behind it."""
        begin, failures = self._base + self._place, 1
        while True:
            if (match := _NEXT.search(self._buffer, self._place + 1)) is None:
                self._place = max(self._place, len(self._buffer) - _OVERLAP - 1)
                if self._more():
                    continue
                value, self._place, self._at_end = None, len(self._buffer), True
                end = self._place
                break
            self._place = match.start()
            try:
                value, end = self._scan(self._buffer, self._place)
            except (ValueError, RecursionError) as error:
                if self._fails_for_lack(error) and self._more():
                    # the search above begins one further on
                    self._place -= 1
                    continue
                # begins that have the names of an element count as elements that were lost
                failures += any(f'"{name}"' in match[0] for name in self._keys[key])
                self._skip(error)
                continue
            if self._is_element(key, value):
                break
            # an object inside of the damaged element: what follows it may be the next one
            self._place = end - 1
        at, begun = self._place, begin - self._base
        # the begin may have left the buffer by now: then nothing can be mended
        if not (mended := list(self._mend(key, self._buffer[begun:at])) if begun >= 0 else []):
            self.damaged, self.lost = self.damaged + failures, self.lost + at - begun
        yield from mended
        if value is not None:
            self._place = end
            yield value

    def _fails_for_lack(self, error: Exception) -> bool:
        """True where an attempt in vain may succeed with more text, and not too many were in vain."""
        if not self._is_cut(error):
            return False
        # quadratic time must not be forced by a file: attempts in vain are paid for
        self._waste += len(self._buffer) - self._place
        return not self._wastes_time

    def _skip(self, error: Exception) -> None:
        """Move on behind the attempt that failed: by one character, or by a long way where too many failed."""
        read = error.pos if isinstance(error, json.JSONDecodeError) else len(self._buffer)
        read = max(read - self._place, 1)
        self._waste += read + _COST_OF_FAILURE + self._place // _COUNTED
        if self._wastes_time:
            self._place = min(self._place + max(read, _LEAP), len(self._buffer)) - 1

    @property
    def _wastes_time(self) -> bool:
        # a fixed amount is free, so that small files are always read to the end
        return self._waste > _FREE_WASTE + _MOST_WASTE * self.characters

    def _is_element(self, key: str, value: Any) -> bool:
        names = self._keys[key]
        return isinstance(value, dict) and (not names or any(name in value for name in names))

    def _mend(self, key: str, text: str) -> Iterator[Any]:
        """Yield the element that a damaged text was, where it is worth it: nulls for nan and inf, plain backslashes."""
        if self._worth is None or not self._worth.search(text):
            return
        try:
            # nan and inf as profilers print them are no JSON
            value, _ = self._scan(_NO_ESCAPE.sub(r"\\\\", _NO_NUMBER.sub("null", text)), 0)
        except (ValueError, RecursionError):
            return
        if self._is_element(key, value):
            self.mended += 1
            yield value


def damage(dropped: Counter[str], records: JsonRecords, losses: list[str], name: str) -> None:
    """Count what damage cost of a JSON. name: of its elements."""
    dropped[f"{name} that are damaged"] += records.damaged
    dropped[f"{name} that are damaged in part, and used"] += records.mended
    for reason in losses:
        dropped[reason] += 1
    if records.cut and not losses:
        dropped["the rest of a JSON that stops, or is damaged"] += 1


def lost_share(records: JsonRecords, losses: list[str]) -> str:
    """The share of a JSON that was lost, in words; "" for none."""
    stops = "what came after the file stops" if records.cut or losses else ""
    if not records.lost:
        return stops
    share = 100 * records.share
    # a share that is not zero is never shown as 0.0 %
    text = f"{share:.1f} %" if share >= 0.1 else f"{share:.1g} %"
    return f"{text} of the file, {records.damaged:,} damaged event{'s' * (records.damaged != 1)}" + (
        f", and {stops}" if stops else ""
    )
