"""Words of launch scripts, which are read and never run: variables, arrays, defaults, arithmetic that a file says.

What only a run would know keeps its name in the word (`${1}`, `$(hostname)`), as does a variable that a condition sets
in two ways and that the script does not decide (`conditions`); `is_open` tells such words.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dse.errors import ConfigError, Problem
from dse_deploy.conditions import TESTS, Branches, decided

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n")
_KEYWORDS = ("then", "do", "export", "declare", "local", "readonly", "env", "exec", "{", "}", "in")
_OPEN = re.compile(r"\$(?:\{|\(|\w)|`")
_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d+)(?::?[-=](.*))?", re.DOTALL)
_DOCUMENT = re.compile(r"[^#\n]*?(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<end>[A-Za-z_]\w*)(?P=quote)[^\n]*\n")
_TARGET = re.compile(r">>?[ \t]*(\S+)|\btee[ \t]+(?:-a[ \t]+)?(\S+)")
_MOST_WORDS, _MOST_TEXT, _MOST_DEPTH = 100_000, 1 << 20, 20
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a // b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


@dataclass(frozen=True)
class Command:
    """A command of a script. place: of its first word among those of the script. line: of the text, from 1."""

    place: int
    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A variable that a script sets. place: the number of words before. value: None where it is as without it."""

    place: int
    name: str
    value: str | None


@dataclass
class Script:
    """words: of all commands, with what variables stand for. exports: variables of the environment.

    two_ways: variables with options that a condition sets in two ways, and the script does not decide it. begins: place
    and line of each command. changes: of variables with one value, in order.
    """

    words: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    two_ways: set[str] = field(default_factory=set)
    begins: list[tuple[int, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def commands(self) -> Iterator[Command]:
        """The commands that have words, in order."""
        ends = [place for place, _ in self.begins] + [len(self.words)]
        for (place, line), end in zip(self.begins, ends[1:], strict=True):
            yield Command(place, line, tuple(self.words[place:end]))


def is_open(text: str) -> bool:
    """Tell whether a word holds what only a run would know."""
    return _OPEN.search(text) is not None


def read_script(text: str) -> Script:
    """The words of a script or of a list of arguments. Raises ConfigError for a quote that does not end."""
    return _ScriptReader(split_documents(text)[0]).script()


def split_documents(text: str) -> tuple[str, dict[str, str]]:
    """A script without the files that it writes (`cat > file <<EOF`), and these by name."""
    kept, written, lines = list[str](), dict[str, str](), text.replace("\r\n", "\n").splitlines(keepends=True)
    places, place = _places(lines), 0
    while place < len(lines):
        match = _DOCUMENT.match(lines[place])
        target = _TARGET.search(lines[place]) if match else None
        end = _after(place, places.get(match["end"], [])) if match and target else None
        if match is None or target is None or end is None:
            kept.append(lines[place])
            place += 1
            continue
        name = (target[1] or target[2]).strip("'\"").rpartition("/")[2]
        written[name] = "".join(lines[place + 1 : end])
        kept.append("\n" * (end + 1 - place))  # lines keep their numbers
        place = end + 1
    return "".join(kept), written


def _places(lines: Sequence[str]) -> dict[str, list[int]]:
    """Words that are a line alone -> the places of these lines."""
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        if _NAME.fullmatch(line.strip()):
            places.setdefault(line.strip(), []).append(place)
    return places


def _after(place: int, places: Sequence[int]) -> int | None:
    """The first of ascending places after one; None where there is none."""
    at = bisect_right(places, place)
    return places[at] if at < len(places) else None


class _Lexer:
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
                if self.text[: self.at].rstrip(" \t").endswith("\\"):  # a comment among lines that go on
                    self.at += 1
            else:
                return

    def word(self) -> list[_WordPart] | str | None:
        """The next word in parts, the character that ends a command, None at the end."""
        self.skip()
        if self.at >= len(self.text):
            return None
        if self.text[self.at] in "\n;&|()<>":
            self.at += 1
            return self.text[self.at - 1]
        parts = list[_WordPart]()
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|()<>":
            if _CONTINUED.match(self.text, self.at):
                break
            parts += self._part()
        joined = list[_WordPart]()
        for part in parts:
            if joined and not part.variable and not joined[-1].variable and part.quoted == joined[-1].quoted:
                joined[-1] = _WordPart(joined[-1].literal + part.literal, quoted=part.quoted)
            else:
                joined.append(part)
        return joined

    def _part(self) -> Iterator[_WordPart]:
        """Yield the parts of a word from here: up to the end of a quote, or one character."""
        char = self.text[self.at]
        if char == "'":
            end = self._find("'")
            yield _WordPart(self.text[self.at + 1 : end].replace("$", "\0"), quoted=True)
            self.at = end + 1
        elif char == '"':
            self._find('"')
            self.at += 1
            yield _WordPart("", quoted=True)
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

    def _one_part(self, *, quoted: bool) -> _WordPart:
        """A character, an escaped one, or what stands for others."""
        char = self.text[self.at]
        if char == "\\" and self.at + 1 < len(self.text):
            self.at += 2
            after = self.text[self.at - 1]
            stays = quoted and after not in '"\\$`'
            return _WordPart("" if after == "\n" else f"\\{after}" if stays else after, quoted=quoted)
        if char == "`":
            end = self._find("`")
            literal = self.text[self.at : end + 1]
            self.at = end + 1
            return _WordPart(literal, quoted=True)
        if char != "$":
            self.at += 1
            return _WordPart(char, quoted=quoted)
        return self._reference(quoted=quoted)

    def _reference(self, *, quoted: bool) -> _WordPart:
        """Read what `$` begins: a variable, arithmetic, or a command."""
        after = self.text[self.at + 1 : self.at + 2]
        if after in ("{", "("):
            end = self._find_close(self.at + 1)
            literal = self.text[self.at : end]
            self.at = end
            return _WordPart(literal, quoted=quoted, variable=True)
        match = re.compile(r"\w+|[@*#?]").match(self.text, self.at + 1)
        name = "" if match is None else match[0] if _NAME.match(match[0]) else match[0][:1]
        self.at += 1 + len(name)
        return _WordPart(f"${name}", quoted=quoted, variable=bool(name))

    def _find_close(self, start: int) -> int:
        """Place after the bracket that closes the one at `start`."""
        pairs, stack = {"{": "}", "(": ")"}, list[str]()
        for place in range(start, len(self.text)):
            char = self.text[place]
            if char in pairs:
                stack.append(pairs[char])
            elif stack and char == stack[-1]:
                stack.pop()
                if not stack:
                    return place + 1
        rule = f"is no command line: no {stack[-1]} closes {self.text[self.at :][:20]!r}"
        raise ConfigError([Problem("settings", rule)])


class _ScriptReader:
    """Reads a text from its start to its end."""

    def __init__(self, text: str, variables: dict[str, list[str]] | None = None, nesting: int = 0) -> None:
        self._lexer, self.nesting = _Lexer(text), nesting
        self.variables = {} if variables is None else variables
        if nesting > _MOST_DEPTH:
            rule = f"has values by default in values by default, over {_MOST_DEPTH} deep"
            raise ConfigError([Problem("settings", rule)])
        self.branches, self.result = Branches(), Script()
        self.condition: list[str] | None = None  # words of a command that decides
        self.condition_of = ""  # "if", "elif", or the test itself
        self.is_first, self.line, self.counted = True, 1, 0  # whether a command begins; lines up to a place
        self.before: dict[str, str | None] = {}  # variables set in front of a command -> their values without it

    def script(self) -> Script:
        """Read all statements."""
        begins, prefix = True, False  # at the start of a command; after `export` and its like
        while (word := self._lexer.word()) is not None:
            if isinstance(word, str):
                begins, prefix = True, False
                self._end_command(word)
                continue
            raw = word[0].literal if len(word) == 1 and not word[0].quoted else ""
            if begins and self._turns(raw):
                continue
            if (begins or prefix) and (raw in _KEYWORDS or self._assign(word, exports=prefix)):
                prefix = prefix or raw in ("export", "env", "declare", "readonly")
                continue
            if begins and raw in TESTS and self.condition is None:
                self.condition, self.condition_of = [], raw
            begins = prefix = False
            self._keep(self._expand(word))
        self._end_command("\n")
        self._export_prefixes()
        return self.result

    def _turns(self, raw: str) -> bool:
        """Go into a condition or a loop, on in it, or out of it, where a word says so."""
        if raw == "then" and self.condition is not None:
            words, self.condition = self.condition, None
            if words[:1] and words[0] not in TESTS:
                self._keep([word for word in words if word != "\n"])
            self.branches.decide(decided(words), is_first=self.condition_of == "if")
            return True
        if not self.branches.turn(raw):
            return False
        if raw in ("if", "elif"):
            self.condition, self.condition_of = [], raw
        return True

    def _end_command(self, separator: str) -> None:
        """Let a test decide about the rest of its line, or end a line."""
        follows = self._lexer.text[self._lexer.at - 1 : self._lexer.at + 1]
        if separator not in "<>" and self._lexer.text[self._lexer.at - 2 : self._lexer.at] not in (
            ">&",
            "<&",
        ):  # but `2>&1`
            self._begin_next()
        if self.condition is not None and self.condition_of in TESTS:
            words, self.condition = self.condition, None
            if follows in ("&&", "||"):
                holds = decided(words)
                self.branches.join(holds if follows == "&&" or holds is None else not holds)
                return
        elif self.condition and follows in ("&&", "||"):
            self.condition.append("\n")  # several commands decide
        elif follows == "||":
            self.branches.turn_round()
        if separator in "\n;":
            self.branches.end_line()

    def _begin_next(self) -> None:
        """Begin another command; what was set in front of the last one alone is as before."""
        if not self.is_first:
            place = len(self.result.words)
            self.result.changes += [Change(place, name, value) for name, value in self.before.items()]
        self.is_first, self.before = True, {}

    def _keep(self, words: Sequence[str]) -> None:
        """Keep the words of a command. Raises ConfigError where they are too many."""
        if self.condition is not None:
            self.condition += words
        elif words and not self.branches.is_skipped:
            if self.is_first:
                self.line += self._lexer.text.count("\n", self.counted, self._lexer.at)
                self.counted, self.is_first = self._lexer.at, False
                self.result.begins.append((len(self.result.words), self.line))
            self.result.words += words
        if len(self.result.words) > _MOST_WORDS or len(self.condition or ()) > _MOST_WORDS:
            raise ConfigError([Problem("settings", f"stands for more than {_MOST_WORDS} words")])

    def _export_prefixes(self) -> None:
        """Let variables that no word of the script names be of the environment: those in front of a command."""
        for name, values in self.variables.items():
            if name not in self.result.exports and len(values) == 1:
                self.result.exports[name] = values[0]

    def _assign(self, word: list[_WordPart], *, exports: bool) -> bool:
        """Set a variable, where a word says so."""
        match = _ASSIGNMENT.match(word[0].literal) if word and not word[0].quoted else None
        if match is None:
            return False
        name, parts = match[1], [_WordPart(word[0].literal[match.end() :]), *word[1:]]
        if self._lexer.text.startswith("(", self._lexer.at) and len(parts) == 1 and not parts[0].literal:
            self._lexer.at += 1
            values = list(self._array())
        else:
            values = [" ".join(self._expand(parts, splits=False))]
        if sum(map(len, values)) > _MOST_TEXT or len(values) > _MOST_WORDS:
            raise ConfigError([Problem(f"settings.{name}", f"stands for more than {_MOST_TEXT} characters")])
        before = self.variables.get(name)
        if self.branches.is_skipped:
            return True
        if match[2] == "+=":
            values = (before or []) + values
        elif self.branches.is_open and before not in (None, values):
            values_of_both = [*(before or []), *values]
            values = [f"${{{name}}}"]  # a condition decides
            if any(word.startswith("-") for value in values_of_both for word in value.split()):
                self.result.two_ways.add(name)
        self.variables[name] = values
        if len(values) == 1:
            self._note(Change(len(self.result.words), name, values[0]), before, exports=exports)
        return True

    def _note(self, change: Change, before: Sequence[str] | None, *, exports: bool) -> None:
        """Note that a variable is set: for the rest of the script, or for the command that it stands in front of."""
        self.result.changes.append(change)
        if exports and change.value is not None:
            self.result.exports[change.name] = change.value
        else:
            self.before.setdefault(change.name, " ".join(before) if before else None)

    def _array(self) -> Iterator[str]:
        """Yield the elements of an array up to its end."""
        while True:
            self._lexer.skip(newlines=True)
            if self._lexer.at >= len(self._lexer.text) or self._lexer.text[self._lexer.at] == ")":
                self._lexer.at += 1
                return
            word = self._lexer.word()
            if word is None:
                return
            if not isinstance(word, str):
                yield from self._expand(word)

    def _expand(self, word: list[_WordPart] | str, *, splits: bool = True) -> list[str]:
        """Words that a word stands for: several where it is an array, or a variable without quotes."""
        words, is_empty = [""], False
        for part in word if isinstance(word, list) else []:
            values = self._values(part.literal) if part.variable else [part.literal]
            if part.variable and not part.quoted and splits:
                values = [piece for value in values for piece in (value.split() or [""])]
            if not values:  # an array without elements
                is_empty = True
                continue
            words[-1] += values[0]
            words += values[1:]
        texts = [text.replace("\0", "$") for text in words]
        stays = not is_empty and any(part.quoted for part in word if isinstance(part, _WordPart))
        return [text for text in texts if text or stays]

    def _values(self, literal: str) -> list[str]:
        """Values that a reference stands for; itself where only a run would know."""
        if literal.startswith("$(("):
            return [self._arithmetic(literal)]
        inner = literal[2:-1] if literal.startswith("${") else literal[1:]
        name = inner.removesuffix("[@]").removesuffix("[*]")
        if name in self.variables:
            return self.variables[name]
        match = _DEFAULT.fullmatch(inner)
        if match is not None and match[2] is not None:
            name = match[1]
            return self.variables.get(name) or [_ScriptReader(match[2], self.variables, self.nesting + 1).value()]
        return [literal]

    def value(self) -> str:
        """The text as a value."""
        words = list[str]()
        while (word := self._lexer.word()) is not None:
            words += self._expand(word)
        return " ".join(words)

    def _arithmetic(self, literal: str) -> str:
        """The whole number that $((...)) is; itself where a name in it has no number."""
        values = {name: " ".join(value) for name, value in self.variables.items()}
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: values.get(match[1], "?"), literal[3:-2])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return literal


@dataclass(frozen=True)
class _WordPart:
    """A part of a word: text, or a reference to what stands elsewhere."""

    literal: str
    quoted: bool = False
    variable: bool = False


def _number(node: ast.expr) -> int:
    """The value of whole numbers and their sums, products, quotients. Raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(value) < 1 << 62:
            return value
    raise ValueError
