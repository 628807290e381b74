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
from dse_deploy.conditions import TESTS, Branches, decided, default_of
from dse_deploy.shell_words import Lexer, WordPart

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
# words after which a command still begins
_KEYWORDS = ("then", "do", "export", "declare", "local", "readonly", "env", "exec", "{", "}", "in")
_OPEN = re.compile(r"\$(?:\{|\(|\w)|`")
# ${NAME:-default}, and ${1:-default} of an argument
_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d+)(?::?[-=](.*))?", re.DOTALL)
# `<<EOF` but not `<<<`, which is a string
_DOCUMENT = re.compile(r"[^#\n]*?(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<end>[A-Za-z_]\w*)(?P=quote)[^\n]*\n")
_TARGET = re.compile(r">>?[ \t]*(\S+)|\btee[ \t]+(?:-a[ \t]+)?(\S+)")
# a few lines of variables that double can stand for gigabytes
_MOST_WORDS, _MOST_TEXT, _MOST_DEPTH = 100_000, 1 << 20, 20
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    # the shell divides whole numbers, towards zero for positive ones
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
    and line of each command. changes: of variables with one value, in order. variables: all, as they are at its end.
    """

    words: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    two_ways: set[str] = field(default_factory=set)
    begins: list[tuple[int, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)

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
    # line by line: a document ends at a line of its word alone
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


class _ScriptReader:
    """Reads a text from its start to its end."""

    def __init__(self, text: str, variables: dict[str, list[str]] | None = None, nesting: int = 0) -> None:
        self._lexer, self.nesting = Lexer(text), nesting
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
                self._end_of_branch(word)
                continue
            # a quoted keyword is a plain word
            raw = word[0].literal if len(word) == 1 and not word[0].quoted else ""
            if begins and self._turns(raw):
                continue
            # `export A=1 B=2`: every word after it may assign
            if (begins or prefix) and (raw in _KEYWORDS or self._assign(word, exports=prefix)):
                prefix = prefix or raw in ("export", "env", "declare", "readonly")
                continue
            # `[ ... ] && word`: a test decides the rest of its line
            if begins and raw in TESTS and self.condition is None:
                self.condition, self.condition_of = [], raw
            begins = prefix = False
            self._keep(self._expand(word))
        self._end_command("\n")
        self._export_prefixes()
        self.result.variables = self.variables
        return self.result

    def _turns(self, raw: str) -> bool:
        """Go into a condition or a loop, on in it, or out of it, where a word says so."""
        if raw == "then" and self.condition is not None:
            words, self.condition = self.condition, None
            # `if command; then`: a command that runs, and its words count
            if words[:1] and words[0] not in TESTS:
                self._keep([word for word in words if word != "\n"])
            default = default_of(words) if words else ""
            self.branches.decide(decided(words), is_first=self.condition_of == "if", default=default)
            return True
        if not self.branches.turn(raw):
            return False
        self._settle()
        if raw == "case":
            self._enter_case()
        if raw in ("if", "elif"):
            self.condition, self.condition_of = [], raw
        return True

    def _enter_case(self) -> None:
        """Read the word of a `case` and its first pattern."""
        # the second word is `in`
        subject, _ = self._lexer.word(), self._lexer.word()
        if isinstance(subject, list):
            self.branches.stack[-1].subject = " ".join(self._expand(subject, splits=False))
        self._read_patterns()

    def _read_patterns(self) -> None:
        """Read the patterns in front of a branch of a `case`, if another one follows."""
        self._lexer.skip(newlines=True)
        if self._lexer.text.startswith("esac", self._lexer.at):
            return
        patterns = list[str]()
        # patterns are separated by |, which is no word of its own here
        while (word := self._lexer.word()) not in (None, ")"):
            if isinstance(word, list):
                patterns.append(" ".join(self._expand(word, splits=False)))
        self.branches.choose(patterns)
        self._settle()

    def _end_of_branch(self, separator: str) -> None:
        """Go to the next branch of a `case` behind `;;`."""
        # the lexer returned one semicolon; the second is still in the text
        if separator == ";" and self.branches.is_in_case and self._lexer.text.startswith(";", self._lexer.at):
            self._lexer.at += 1
            self._read_patterns()

    def _settle(self) -> None:
        """Give variables of branches that ended the values that all of these agree on, else none that is known."""
        for name, values in self.branches.take_left().items():
            former = self.variables.pop(name, [])
            if values is not None:
                self.variables[name] = values
            # inside of a branch that does not know it the variable is unset; after all of them it is open
            elif not self.branches.stack or name not in self.branches.stack[-1].names_before:
                self.variables[name] = [f"${{{name}}}"]
                self._tell_options(name, former)
            if name in self.result.exports and name in self.variables:
                self.result.exports[name] = " ".join(self.variables[name])

    def _tell_options(self, name: str, values: Sequence[str]) -> None:
        if any(word.startswith("-") for value in values for word in value.split()):
            self.result.two_ways.add(name)

    def _end_command(self, separator: str) -> None:
        """Let a test decide about the rest of its line, or end a line."""
        # && and || arrive as two separators: the text shows both
        follows = self._lexer.text[self._lexer.at - 1 : self._lexer.at + 1]
        if separator not in "<>" and self._lexer.text[self._lexer.at - 2 : self._lexer.at] not in (
            ">&",
            "<&",
        ):  # but `2>&1`
            self._begin_next()
        if self.condition is not None and self.condition_of in TESTS:
            words, self.condition = self.condition, None
            if follows in ("&&", "||"):
                holds, default = decided(words), default_of(words) if follows == "&&" else ""
                # `test || word` runs if the test fails
                self.branches.join(holds if follows == "&&" or holds is None else not holds, default)
                return
        elif self.condition and follows in ("&&", "||"):
            self.condition.append("\n")  # several commands decide
        # what follows `||` runs only if the command fails, which is not expected
        elif follows == "||":
            self.branches.turn_round()
            self._settle()
        if separator in "\n;":
            self.branches.end_line()
            self._settle()

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
        # `NAME=value command` on a line without export: programs read it all the same
        for name, values in self.variables.items():
            # arrays are never exported
            if name not in self.result.exports and len(values) == 1:
                self.result.exports[name] = values[0]

    def _assign(self, word: list[WordPart], *, exports: bool) -> bool:
        """Set a variable, where a word says so."""
        match = _ASSIGNMENT.match(word[0].literal) if word and not word[0].quoted else None
        if match is None:
            return False
        # the value begins behind the =, and may go on in further parts
        name, parts = match[1], [WordPart(word[0].literal[match.end() :]), *word[1:]]
        # NAME=(...) is an array
        if self._lexer.text.startswith("(", self._lexer.at) and len(parts) == 1 and not parts[0].literal:
            self._lexer.at += 1
            values = list(self._array())
        else:
            values = [" ".join(self._expand(parts, splits=False))]
        # x=$x$x doubles with each line: a short script must not fill the memory
        if sum(map(len, values)) > _MOST_TEXT or len(values) > _MOST_WORDS:
            raise ConfigError([Problem(f"settings.{name}", f"stands for more than {_MOST_TEXT} characters")])
        before = self.variables.get(name)
        # a branch that the script never takes
        if self.branches.is_skipped:
            return True
        added = self._new_part(match[2], before or [], values)
        if match[2] == "+=":
            values = (before or []) + values
        # first set here: known inside the branch, and afterwards if all branches agree
        if self.branches.is_open and before is None:
            self.branches.note(name, values, is_first=True)
        # another value than before the branch: after it, either may hold
        elif self.branches.is_open and before != values and not self.branches.is_first_here(name):
            values = self._in_two_ways(name, before or [], values, added)
        elif self.branches.is_open:
            self.branches.note(name, values, is_first=False)
        self.variables[name] = values
        if len(values) == 1:
            self._note(Change(len(self.result.words), name, values[0]), before, exports=exports)
        return True

    @staticmethod
    def _new_part(operator: str, before: list[str], values: list[str]) -> list[str] | None:
        """What an assignment puts behind the value before it; None where it puts another value in its place."""
        if operator == "+=":
            return values
        if before and values[: len(before)] == before:
            return values[len(before) :]
        if len(before) == len(values) == 1 and values[0].startswith(before[0]):
            return [values[0][len(before[0]) :].strip()]
        return None

    def _in_two_ways(self, name: str, before: list[str], values: list[str], added: list[str] | None) -> list[str]:
        """The value of a variable that a condition sets in two ways: options that it has in any case are known."""
        self._tell_options(name, [*before, *values])
        mark = f"${{{name}}}"
        if added is None or name not in self.result.two_ways:
            return [mark]
        # open already: further branches add nothing that is known
        if mark in before or any(mark in value.split() for value in before):
            return before
        # `--` keeps what is open apart from the options before it
        return [" ".join([*before, "--", mark])] if len(before) == 1 else [*before, "--", mark]

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

    def _expand(self, word: list[WordPart] | str, *, splits: bool = True) -> list[str]:
        """Words that a word stands for: several where it is an array, or a variable without quotes."""
        words, is_empty = [""], False
        for part in word if isinstance(word, list) else []:
            values = self._values(part.literal) if part.variable else [part.literal]
            # unquoted references are split at blanks, as the shell does
            if part.variable and not part.quoted and splits:
                values = [piece for value in values for piece in (value.split() or [""])]
            if not values:  # an array without elements
                is_empty = True
                continue
            words[-1] += values[0]
            words += values[1:]
        # \0 stood for a $ inside of single quotes, which refers to nothing
        texts = [text.replace("\0", "$") for text in words]
        # "" is a word, while an empty reference without quotes is none
        stays = not is_empty and any(part.quoted for part in word if isinstance(part, WordPart))
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
            # the default is itself a text with references
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
        # a name without a number becomes ?, which is no expression
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: values.get(match[1], "?"), literal[3:-2])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return literal


def _number(node: ast.expr) -> int:
    """The value of whole numbers and their sums, products, quotients. Raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(value) < 1 << 62:
            return value
    raise ValueError
