"""Names of kernels, reduced to what says what they do.

Tools write a kernel as a signature: return type, namespaces, templates, arguments, perhaps mangled (Itanium ABI), cut
off, or with a suffix. What is left of `void (anonymous namespace)::dispatch<false, 8>(int4*, float*)` is the base name
`dispatch`; the namespace and the arguments of templates are kept apart, as some kernels (`cutlass::device_kernel<...>`)
say what they are in these alone.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import cached_property

MOST_LETTERS = 1 << 13
"""Of a name, that are looked at."""
# marks of compilers and loaders: clones, kernel descriptors of AMD, partial inlining
_SUFFIX = re.compile(r"(\s*\[clone [^\]]*\]|\.kd|\.(isra|constprop|part|cold|llvm)(\.\d+)*)+\s*$")
_NAMELESS = re.compile(
    r"\(anonymous( namespace| class)?\)|\{anonymous\}|<unnamed>|`anonymous[ -]namespace'"
    r"|\b_GLOBAL__N_\w*|\b_NV_ANON_NAMESPACE\b|\b_INTERNAL_\w+"
)
# tokens at which a signature changes its level; `->` is one, so that its > closes no template
_MARKS = re.compile(r"->|::|[<>()\[\]{}\s]")
_CLOSES = {">": "<", ")": "(", "]": "[", "}": "{"}
# between aB, between the capitals of ABc, and at what is no letter or digit
_CASES = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\W]+")
_COPY = re.compile(r"\[?(cuda |hip )?mem(cpy|set)|copy(host|device|peer|buffer)|fillbuffer|memory_?copy", re.IGNORECASE)


@dataclass(frozen=True)
class KernelName:
    """A kernel's base name, its namespace (`a::b`, or ""), and the arguments of its templates."""

    base: str
    namespace: str = ""
    arguments: str = ""

    @property
    def qualified(self) -> str:
        """The namespace and the base name."""
        return f"{self.namespace}::{self.base}" if self.namespace else self.base

    @cached_property
    def words(self) -> str:
        """The words of the base name in small letters, with a blank between them.

        >>> KernelName("moeA2ADispatchKernel").words, KernelName("cross_device_reduce_2stage").words
        ('moe a2a dispatch kernel', 'cross device reduce 2stage')
        """
        return " ".join(filter(None, _CASES.split(self.base))).lower()

    def label(self, most: int = 40) -> str:
        """A short name, with the namespace if it fits."""
        return (self.qualified if len(self.qualified) <= most else self.base)[:most]


@functools.lru_cache(maxsize=1 << 14)
def reduce_name(text: str) -> KernelName:
    """The base name, the namespace and the template arguments of a kernel, as a tool wrote its name.

    >>> reduce_name("void deep_ep::intranode::combine<__nv_bfloat16, 8>(__nv_bfloat16*, float*)").qualified
    'deep_ep::intranode::combine'
    >>> reduce_name("_ZN7deep_ep9intranode8dispatchILi8EEEvP4int4").qualified
    'deep_ep::intranode::dispatch'
    """
    plain = _SUFFIX.sub("", text[:MOST_LETTERS].strip()).strip().removeprefix("typeinfo name for ")
    # names of copies hold brackets and arrows that are no signature
    if _COPY.match(plain):
        return KernelName(plain)
    # one or two underscores before _Z: macOS and some tools add one
    mangled = re.match(r"_?_Z(TS)?[NLZ\dS]", plain)
    name = _Mangled(plain).name() if mangled else _of_signature(_NAMELESS.sub("", plain))
    # a name that cannot be reduced is kept as a whole
    return name if name.base else KernelName(plain)


def _of_signature(text: str) -> KernelName:
    """The name that a signature, whole or cut off, is of: what stands before its arguments, without the return type."""
    if not re.search(r"[(<]", text) and " " in text.removeprefix("void "):
        return KernelName(text)  # words, and no signature
    words, parts, arguments = list[KernelName](), [""], list[str]()
    open_at, since = list[str](), 0
    # None at the end: the rest after the last mark is handled in the same way
    for mark in (*_MARKS.finditer(text), None):
        token, at = (mark.group(), mark.start()) if mark else ("", len(text))
        if open_at:
            if not mark or _step(token, open_at):
                arguments.append(text[since:at])
                since = at + len(token)
            continue
        parts[-1] += text[since:at]
        since = at + len(token)
        # a namespace: the template arguments so far were of a class around the kernel
        if token == "::":
            parts, arguments = [*parts, ""], []
        # a blank ends the return type or a qualifier: the last word is the name
        elif token.isspace():
            words, parts, arguments = [*words, _join(parts, arguments)], [""], []
        # arguments begin here; decltype(...) is a part of the return type
        elif token == "(" and parts[-1] != "decltype":
            break
        elif token and token in "<([{":
            open_at.append(token)
    named = [word for word in (*words, _join(parts, arguments)) if word.base]
    return named[-1] if named else KernelName("")


def _join(parts: list[str], arguments: list[str]) -> KernelName:
    *outer, base = [part for part in parts if part] or [""]
    return KernelName(base, "::".join(outer), " ".join(arguments))


def _step(token: str, open_at: list[str]) -> bool:
    """Follow a bracket inside of others; True where the outermost one closes."""
    # inside () a < is a comparison
    if token in "<([{" and not (token == "<" and open_at[-1] != "<"):
        open_at.append(token)
    # a > closes only templates: in other brackets it is an operator
    elif token in _CLOSES and _CLOSES[token] in open_at and (token != ">" or open_at[-1] == "<"):
        # a bracket that was never closed is dropped with the one around it
        while open_at.pop() != _CLOSES[token]:
            pass
    return not open_at


class _Mangled:
    """A mangled name (Itanium C++ ABI), of which names are read and types are passed over."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._names, self._arguments = list[str](), list[str]()

    def name(self) -> KernelName:
        """The function, or of a local entity the function around it, as far as the text goes."""
        if prefix := re.match(r"_?_Z(TS)?Z*", self._text):
            self._at = prefix.end()
        nested = self._take("N")
        while self._at < len(self._text) and self._component():
            # a plain name is one component; its template arguments may follow
            if not nested and self._names and self._text[self._at : self._at + 1] != "I":
                break
        *outer, base = self._names or [""]
        return KernelName(base, "::".join(outer), " ".join(self._arguments))

    def _take(self, pattern: str) -> str:
        """Pass the text that stands here, if it has a form, and return it."""
        match = re.compile(pattern).match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match.group() if match else ""

    def _component(self) -> bool:
        """Read a part of a nested name; False at its end."""
        if self._take("I"):
            self._template()
            return bool(self._names)
        if (name := self._source()) is not None:
            if name and not name.startswith("_GLOBAL__N"):
                self._names.append(name)
            return True
        # qualifiers, substitutions (St is std), constructors, local types and operators: no names to keep
        return bool(self._take(r"[rVKRO]+|L|St|S[absiod]|S[0-9A-Z]*_|[CD]\d|Ut\d*_|B(?=\d)|(cl|pl|mi|ls|rs)(?=[EI])"))

    def _source(self) -> str | None:
        """The name with its length before it that stands here; None where there is none."""
        if not (digits := self._take(r"[1-9]\d{0,3}")):
            return None
        self._at += int(digits)
        return self._text[self._at - int(digits) : self._at]

    def _template(self) -> None:
        """Pass the arguments of a template and keep the names in them, and the values of enumerations."""
        opened, names = ["I"], list[str]()
        while opened and self._at < len(self._text):
            if (name := self._source()) is not None:
                names.append(name)
            elif self._take("E"):
                closed = opened.pop()
                # a value of an enumeration: (Type)3, as demanglers write it
                if closed == "L" and (value := self._take(r"n?\d+E?")):
                    names.append(f"({names[-1] if names else ''}){value.rstrip('E')}")
                # a lambda ends with its number, and what is no lambda with nothing: (?!) never matches
                self._take(r"\d*_" if closed == "U" else r"(?!)")
            else:
                self._pass(opened)
        self._arguments += names

    def _pass(self, opened: list[str]) -> None:
        """Pass what is no name: a type, a literal, or the begin of something that ends with E."""
        # literals, substitutions, template parameters, arrays, vectors, builtin types, lambdas, function parameters
        if self._take(r"L[a-z]n?[\da-f.]*E|S[absiodt]|S[0-9A-Z]*_|T[0-9]*_|A\d*_|Dv\d*_|D[a-z]|Ut\d*_|fp\w?\d*_"):
            return
        if self._take(r"LN"):
            opened.append("L")
        elif self._take(r"L_Z"):
            opened.append("Z")
        elif mark := self._take(r"Ul|[INXJFZ]|L"):
            opened.append(mark[0] if mark != "L" else "Z")
        else:
            # builtin types of one letter
            self._at += 1
