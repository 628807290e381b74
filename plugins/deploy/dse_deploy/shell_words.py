"""Words of a shell, one after the other: quotes, references to variables, lines that go on, comments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dse.errors import ConfigError, Problem

_NAME = re.compile(r"[A-Za-z_]\w*")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n")


@dataclass(frozen=True)
class WordPart:
    """A part of a word: text, or a reference to what stands elsewhere."""

    literal: str
    quoted: bool = False
    variable: bool = False


def _joined(parts: Sequence[WordPart]) -> list[WordPart]:
    """Parts of a word in which neighbouring texts are one; each is joined once, as a word may be a file long."""
    joined = list[WordPart]()
    for (variable, quoted), neighbours in groupby(parts, lambda part: (part.variable, part.quoted)):
        alike = list(neighbours)
        joined += alike if variable else [WordPart("".join(part.literal for part in alike), quoted=quoted)]
    return joined


class Lexer:
    """Words of a script, and the place up to which they are read. Raises ConfigError for a quote without an end."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\r\n", "\n"), 0

    def skip(self, *, newlines: bool = False) -> None:
        """Go past blanks, lines that go on, and comments, whose own line ends them."""
        while self.at < len(self.text):
            if match := _CONTINUED.match(self.text, self.at):
                self.at = match.end()
            elif self.text[self.at] in " \t\r" or (newlines and self.text[self.at] == "\n"):
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
                if self._follows_backslash():  # a comment among lines that go on
                    self.at += 1
            else:
                return

    def _follows_backslash(self) -> bool:
        """Tell whether the last character before this place that is no blank is a backslash."""
        place = self.at - 1
        while place >= 0 and self.text[place] in " \t":
            place -= 1
        return place >= 0 and self.text[place] == "\\"

    def word(self) -> list[WordPart] | str | None:
        """The next word in parts, the character that ends a command, None at the end."""
        self.skip()
        if self.at >= len(self.text):
            return None
        if self.text[self.at] in "\n;&|()<>":
            self.at += 1
            return self.text[self.at - 1]
        parts = list[WordPart]()
        # a word ends at a blank or an operator outside of quotes
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|()<>":
            if _CONTINUED.match(self.text, self.at):
                break
            parts += self._part()
        return _joined(parts)

    def _part(self) -> Iterator[WordPart]:
        """Yield the parts of a word from here: up to the end of a quote, or one character."""
        char = self.text[self.at]
        if char == "'":
            end = self._find("'")
            # a $ in single quotes refers to nothing: it is kept as \0 until variables are replaced
            yield WordPart(self.text[self.at + 1 : end].replace("$", "\0"), quoted=True)
            self.at = end + 1
        elif char == '"':
            self._find('"')
            self.at += 1
            # an empty pair of quotes is a word, too
            yield WordPart("", quoted=True)
            while self.text[self.at : self.at + 1] not in ('"', ""):
                yield self._one_part(quoted=True)
            self.at += 1
        else:
            yield self._one_part(quoted=False)

    def _find(self, char: str) -> int:
        """Place of the quote that ends one here. Raises ConfigError where none does."""
        end = self.text.find(char, self.at + 1)
        if end < 0:
            raise ConfigError([Problem("settings", "is no command line: no closing quotation")])
        return end

    def _one_part(self, *, quoted: bool) -> WordPart:
        """A character, an escaped one, or what stands for others."""
        char = self.text[self.at]
        if char == "\\" and self.at + 1 < len(self.text):
            self.at += 2
            after = self.text[self.at - 1]
            # in double quotes a backslash escapes only these, and stays before other characters
            stays = quoted and after not in '"\\$`'
            return WordPart("" if after == "\n" else f"\\{after}" if stays else after, quoted=quoted)
        if char == "`":
            end = self._find("`")
            literal = self.text[self.at : end + 1]
            self.at = end + 1
            # the output of a command: never split, and never known
            return WordPart(literal, quoted=True)
        if char != "$":
            self.at += 1
            return WordPart(char, quoted=quoted)
        return self._reference(quoted=quoted)

    def _reference(self, *, quoted: bool) -> WordPart:
        """Read what `$` begins: a variable, arithmetic, or a command."""
        after = self.text[self.at + 1 : self.at + 2]
        if after in ("{", "("):
            end = self._find_close(self.at + 1)
            literal = self.text[self.at : end]
            self.at = end
            return WordPart(literal, quoted=quoted, variable=True)
        match = re.compile(r"\w+|[@*#?]").match(self.text, self.at + 1)
        # $12 is the first argument and a 2; names are as long as possible
        name = "" if match is None else match[0] if _NAME.match(match[0]) else match[0][:1]
        self.at += 1 + len(name)
        return WordPart(f"${name}", quoted=quoted, variable=bool(name))

    def _find_close(self, start: int) -> int:
        """Place after the bracket that closes the one at `start`."""
        pairs, stack = {"{": "}", "(": ")"}, list[str]()
        for place in range(start, len(self.text)):
            char = self.text[place]
            if char in pairs:
                stack.append(pairs[char])
            # brackets of the other sort inside are pairs of their own
            elif stack and char == stack[-1]:
                stack.pop()
                if not stack:
                    return place + 1
        rule = f"is no command line: no {stack[-1]} closes {self.text[self.at :][:20]!r}"
        raise ConfigError([Problem("settings", rule)])
