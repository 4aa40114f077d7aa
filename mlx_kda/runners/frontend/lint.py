"""Rules of Metal that clang does not know, checked on the tokens of a text."""

import re
from collections.abc import Iterator
from itertools import pairwise

from ..rewrite import FLOAT, Token, preprocessor_lines, tokens
from ..text import KernelText

SPACES = {"device", "constant", "threadgroup", "thread", "threadgroup_imageblock"}
FORBIDDEN = {
    "double": "double does not exist in Metal",
    "goto": "goto does not exist in Metal",
    "new": "no allocation in Metal",
    "delete": "no allocation in Metal",
    "virtual": "no virtual functions in Metal",
    "dynamic_cast": "no run-time types in Metal",
    "typeid": "no run-time types in Metal",
    "try": "no exceptions in Metal",
    "catch": "no exceptions in Metal",
    "throw": "no exceptions in Metal",
    "thread_local": "thread_local does not exist in Metal",
    "std": "no C++ standard library in Metal",
    "function_constant": "MLX cannot set function constants",
}
NUMBERS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
TYPES = {*NUMBERS, "void", "size_t", "half", "bfloat", "float"}
TYPES |= {f"{t}{n}" for t in list(TYPES) for n in (2, 3, 4)}
TYPES |= {f"{s}int{n}_t" for s in ("", "u") for n in (8, 16, 32, 64)}
TYPES |= {"bfloat16_t", "float16_t"}
BARRIERS = {"threadgroup_barrier", "simdgroup_barrier"}


def lint(text: KernelText, house_rules: bool) -> Iterator[tuple[int, str]]:
    """(Line of the text, complaint) of each violation."""
    for number, line in enumerate(text.text.split("\n"), 1):
        if not line.isascii():
            yield number, "text that is not ASCII"
    toks = [t for t in tokens(text.text) if t.kind not in ("space", "comment", "attribute")]
    types = TYPES | _declared_types(toks)
    for i, token in enumerate(toks):
        if token.kind == "name" and token.text in FORBIDDEN:
            yield token.line, FORBIDDEN[token.text]
        if house_rules and token.kind == "number" and _lacks_suffix(token.text):
            yield token.line, f"the literal {token.text} needs a suffix (it is a double in C++)"
        if token.text == "[" and _starts_lambda(toks, i):
            yield token.line, "a lambda, which Metal does not have"
        if token.text in types and _bare_pointer(toks, i):
            yield token.line, "a pointer or reference without an address space"
    yield from _includes(text)
    yield from _threadgroup_outside(text, toks)
    if house_rules:
        yield from _returns_above_barriers(text, toks)


def _lacks_suffix(number: str) -> bool:
    found = FLOAT.match(number)
    return found is not None and not found.group("suffix")


def _declared_types(toks: list[Token]) -> set[str]:
    """Names declared as types by typename, class, struct, using and typedef."""
    found = set()
    for a, b in pairwise(toks):
        if a.text in ("typename", "class", "struct", "using") and b.kind == "name":
            found.add(b.text)
    return found - {"namespace", "metal", "mlx"}


def _starts_lambda(toks: list[Token], i: int) -> bool:
    before = toks[i - 1] if i else None
    if before is not None and (before.kind in ("name", "number") or before.text in (")", "]", ">")):
        return before.text == "return"
    depth, at = 0, i
    while at < len(toks):
        depth += {"[": 1, "]": -1}.get(toks[at].text, 0)
        if depth == 0:
            break
        at += 1
    return at + 1 < len(toks) and toks[at + 1].text in ("(", "{")


def _bare_pointer(toks: list[Token], i: int) -> bool:
    """Is token i a type, followed by * or &, with no address space in the declaration?"""
    at = i + 1
    if at < len(toks) and toks[at].text == "const":
        at += 1
    if at >= len(toks):
        return False
    if toks[at].text == "(" and at + 1 < len(toks) and toks[at + 1].text in ("&", "*"):
        # float (&x)[4]
        if not (
            toks[at + 2].kind == "name" and toks[at + 3].text == ")" and toks[at + 4].text == "["
        ):
            return False
    elif toks[at].text not in ("*", "&"):
        return False
    while toks[at].text in ("*", "&", "("):
        at += 1
    if toks[at].text in SPACES:
        return False
    back = i - 1
    while back >= 0 and (toks[back].kind == "name" or toks[back].text == "::"):
        if toks[back].text in SPACES:
            return False
        if toks[back].text in ("return", "sizeof", "case", "operator", "using"):
            return False
        back -= 1
    return True


def _includes(text: KernelText) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.text.split("\n"), 1):
        found = re.match(r"\s*#\s*include\s*[<\"]([^>\"]*)", line)
        if found and not found.group(1).startswith("metal_"):
            yield number, f"{found.group(1)} is not there when MLX compiles a kernel"


def _threadgroup_outside(text: KernelText, toks: list[Token]) -> Iterator[tuple[int, str]]:
    """A threadgroup variable outside the kernel: ``threadgroup T name [;[,]`` in the header."""
    for i, token in enumerate(toks):
        if token.text != "threadgroup" or token.line > text.header_lines:
            continue
        at = i + 1
        while toks[at].kind == "name" and toks[at + 1].kind == "name":
            at += 1
        if toks[at].kind == "name" and toks[at + 1].text == "<":
            continue
        if at > i + 1 and toks[at + 1].text in ("[", ";", ",") and toks[i - 1].text in "{};":
            yield token.line, "a threadgroup variable outside the kernel's body"


def _returns_above_barriers(text: KernelText, toks: list[Token]) -> Iterator[tuple[int, str]]:
    """In every function: a return followed, later in the same function, by a barrier."""
    macros = preprocessor_lines(text.text)
    depth = 0
    functions: list[tuple[int, list[Token]]] = []  # (depth of its brace, its returns)
    for i, token in enumerate(toks):
        if token.line in macros:
            continue
        if token.text == "{":
            depth += 1
            if _opens_function(toks, i):
                functions.append((depth, []))
        elif token.text == "}":
            if functions and functions[-1][0] == depth:
                functions.pop()
            depth -= 1
        elif token.text == "return" and functions:
            functions[-1][1].append(token)
        elif token.text in BARRIERS and functions:
            for found in functions[-1][1]:
                yield found.line, f"a return above the barrier on line {token.line} of the text"
            functions[-1][1].clear()


def _opens_function(toks: list[Token], i: int) -> bool:
    """Does the brace at token i follow a parameter list (and not that of if, for, while...)?"""
    at = i - 1
    while at >= 0 and toks[at].text in ("const", "thread", "device", "threadgroup", "constant"):
        at -= 1
    if at < 0 or toks[at].text != ")":
        return False
    depth = 0
    while at >= 0:
        depth += {")": 1, "(": -1}.get(toks[at].text, 0)
        if depth == 0:
            break
        at -= 1
    return at > 0 and toks[at - 1].text not in ("if", "for", "while", "switch", "constexpr")
