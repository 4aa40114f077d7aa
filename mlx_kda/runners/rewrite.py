"""The few changes that turn generated Metal text into C++, line for line.

- a variable declared ``threadgroup T name[N];`` becomes what the dialect makes of it (pointers and
  references to threadgroup memory are left alone);
- attributes in double brackets are dropped, function constants refused;
- a floating literal without a suffix is a float in Metal, and ``h`` and ``bf`` are suffixes.
Anything that is not recognised is left to the compiler, which rejects it, or refused here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[0-9a-zA-Z_.])*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<attribute>\[\[[^\[\]]*\]\])
      | (?P<space>(?:\s|\\\n)+)
      | (?P<punctuation>::|.)""",
    re.VERBOSE | re.DOTALL,
)
FLOAT = re.compile(
    r"(?P<value>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    r"(?P<suffix>[a-zA-Z]*)\Z"
)


class Unsupported(Exception):
    """A construct that cannot be rewritten, and its line in the text."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass
class Token:
    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """All tokens of the text, spaces and comments included."""
    result: list[Token] = []
    line = 1
    for match in TOKEN.finditer(text):
        result.append(Token(match.lastgroup or "", match.group(), line))
        line += match.group().count("\n")
    return result


def preprocessor_lines(text: str) -> set[int]:
    """The numbers of the lines that belong to a preprocessor directive."""
    lines, inside = set(), False
    for number, line in enumerate(text.split("\n"), 1):
        if inside or re.match(r"\s*#", line):
            lines.add(number)
            inside = line.endswith("\\")
    return lines


@dataclass(frozen=True)
class Dialect:
    """How the parts that are not C++ are written: ``declare(type, name, suffix, number)`` for a
    threadgroup variable, ``vector(name)`` for a vector type used as a constructor, ``erase`` the
    words that are left out (elsewhere they are macros)."""

    declare: Callable[[str, str, str, int], str]
    vector: Callable[[str], str] | None = None
    erase: frozenset[str] = frozenset()


def _declare_shared(base: str, name: str, suffix: str, number: int) -> str:
    kind = f"emu_type_of<{base}{suffix}>"
    return f"{kind}& {name} = emu_shared<{kind}>({number});"


# A threadgroup variable is a reference to memory that all threads share.
EMULATOR = Dialect(_declare_shared)

VECTOR = re.compile(
    r"(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]\Z"
)


def _number(token: Token) -> str:
    match = FLOAT.match(token.text)
    if not match:
        return token.text
    value, suffix = match.group("value"), match.group("suffix")
    if suffix in ("", "f", "F"):
        return value + "f"
    if suffix in ("h", "H"):
        return f"half({value}f)"
    if suffix in ("bf", "BF"):
        return f"bfloat({value}f)"
    raise Unsupported(f"the literal {token.text}", token.line)


class _Shared:
    """Finds and rewrites declarations of threadgroup variables."""

    def __init__(self, toks: list[Token], dialect: Dialect):
        self.toks = toks
        self.dialect = dialect
        self.count = 0
        self.names: list[str] = []

    def _next(self, i: int) -> int:
        i += 1
        while i < len(self.toks) and self.toks[i].kind in ("space", "comment"):
            i += 1
        return i

    def is_call(self, i: int) -> bool:
        at = self._next(i)
        return at < len(self.toks) and self.toks[at].text == "("

    def _closing(self, i: int, opening: str, closing: str) -> int:
        depth = 0
        while i < len(self.toks):
            if self.toks[i].text == opening:
                depth += 1
            elif self.toks[i].text == closing:
                depth -= 1
                if depth == 0:
                    return i
            i += 1
        return i

    def _type(self, i: int) -> int | None:
        """The end (exclusive) of the type that starts at token i, or None."""
        words, last = 0, i
        while i < len(self.toks):
            token = self.toks[i]
            if token.text == "::":
                words, last = 0, i
            elif token.kind == "name" and token.text in ("const", "volatile", "typename", "struct"):
                pass
            elif token.kind == "name":
                if words and not (token.text in _PARTS and self.toks[last].text in _PARTS):
                    return i
                words, last = words + 1, i
            elif token.text == "<" and words:
                i = self._closing(i, "<", ">")
            else:
                return i if words else None
            i = self._next(i)
        return None

    def declaration(self, i: int) -> tuple[int, str] | None:
        """(end, replacement) for a declaration whose ``threadgroup`` is token i, else None."""
        first = self._next(i)
        end = self._type(first)
        if end is None or end >= len(self.toks) or self.toks[end].kind != "name":
            return None
        base = "".join(t.text for t in self.toks[first:end] if t.kind != "comment").strip()
        out: list[str] = []
        at = end
        while True:
            name = self.toks[at]
            if name.kind != "name":
                raise Unsupported("a threadgroup declaration of this form", name.line)
            suffix, at = "", self._next(at)
            while at < len(self.toks) and self.toks[at].text == "[":
                close = self._closing(at, "[", "]")
                suffix += "".join(t.text for t in self.toks[at : close + 1])
                at = self._next(close)
            if self.toks[at].text not in (",", ";"):
                if self.toks[at].text in ("=", "{"):
                    raise Unsupported("a threadgroup variable with an initialiser", name.line)
                return None
            base, suffix = base.replace("\\\n", " "), suffix.replace("\\\n", " ")
            out.append(self.dialect.declare(base, name.text, suffix, self.count))
            self.names.append(name.text)
            self.count += 1
            if self.toks[at].text == ";":
                break
            at = self._next(at)
        body = " ".join(part.replace("\n", " ") for part in out)
        skipped = [t.text for t in self.toks[i : at + 1]]
        newlines = "".join(re.findall(r"\\\n|\n", "".join(skipped)))
        return at + 1, body + newlines


_PARTS = {"unsigned", "signed", "long", "short", "int", "char"}


# Several SIMD operations or barriers on one line get line numbers of their own, this far apart, so
# that the runtime can tell which of them a lane has reached.
LINE_STEP = 100_000
SYNC_POINT = re.compile(r"(simd|quad|simdgroup)_\w+\Z|threadgroup_barrier\Z")


class _SyncPoints:
    """Numbers the SIMD operations and barriers of a line with #line directives."""

    def __init__(self, text: str, file: str | None):
        self.file = file
        self.macros = preprocessor_lines(text)
        self.names = set(re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M))
        self.parentheses: list[bool] = []  # the open ones: is each that of a macro's arguments?
        self.seen: dict[int, int] = {}
        self.renumbered = False

    def parenthesis(self, token: Token, name: str) -> None:
        if token.text == "(":
            self.parentheses.append(name in self.names)
        elif token.text == ")" and self.parentheses:
            self.parentheses.pop()

    def before(self, token: Token, is_call: bool) -> str:
        if not (self.file and is_call and SYNC_POINT.match(token.text)):
            return ""
        if token.line in self.macros or any(self.parentheses):
            return ""  # no directive may stand there
        nth = self.seen[token.line] = self.seen.get(token.line, -1) + 1
        if not nth:
            return ""
        self.renumbered = True
        return f'\n#line {nth * LINE_STEP + token.line} "{self.file}"\n'

    def newline(self, token: Token) -> str:
        """The token, with the line number corrected after its first newline if it was changed."""
        if not self.renumbered or "\n" not in token.text:
            return token.text
        self.renumbered = False
        first, rest = token.text.split("\n", 1)
        return f'{first}\n#line {token.line + 1} "{self.file}"\n{rest}'


@dataclass
class Rewritten:
    """C++ with the lines of the Metal text, and its threadgroup variables by number."""

    text: str
    shared_names: list[str]


def rewrite(text: str, dialect: Dialect, file: str | None = None) -> Rewritten:
    """C++ with the same lines as ``text``, and the names of its threadgroup variables by number.

    With a ``file`` name, lines with several SIMD operations number them (see LINE_STEP).
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.isascii():
            raise Unsupported("text that is not ASCII", number)
    toks = tokens(text)
    shared = _Shared(toks, dialect)
    sync_points = _SyncPoints(text, file)
    out: list[str] = []
    i = 0
    while i < len(toks):
        token = toks[i]
        sync_points.parenthesis(token, toks[i - 1].text if i else "")
        if token.kind == "name":
            out.append(sync_points.before(token, shared.is_call(i)))
        if token.kind in ("space", "comment"):
            out.append(sync_points.newline(token))
        elif token.kind == "attribute":
            if "function_constant" in token.text:
                raise Unsupported("function constants (MLX cannot set them)", token.line)
            out.append("\n" * token.text.count("\n"))
        elif token.kind == "number":
            out.append(_number(token))
        elif token.text == "threadgroup" and token.kind == "name":
            found = shared.declaration(i)
            if found:
                i, replacement = found
                out.append(replacement)
                continue
            out.append("" if token.text in dialect.erase else token.text)
        elif token.kind == "name" and token.text in dialect.erase:
            pass
        elif token.kind == "name" and token.text == "double":
            raise Unsupported("double, which Metal does not have", token.line)
        elif dialect.vector and VECTOR.match(token.text) and shared.is_call(i):
            out.append(dialect.vector(token.text))
        else:
            out.append(token.text)
        i += 1
    return Rewritten("".join(out), shared.names)
