"""``frontend_check``: would Apple's compiler accept this text, and what does it declare?"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..rewrite import Dialect, Unsupported, rewrite
from ..text import KernelText
from .clang import compile_text
from .lint import lint

MAX_THREADGROUP_BYTES = 32768
NAME = "kernel.metal"
SECTION = "emu_threadgroup"


@dataclass(frozen=True)
class Diagnostic:
    """One complaint. ``line`` counts in the source, ``header_line`` in the header; ``text`` is
    that line. Both are None for a complaint about the generated part or the whole."""

    message: str
    line: int | None = None
    header_line: int | None = None
    text: str = ""

    def __str__(self) -> str:
        where = ""
        if self.line is not None:
            where = f"line {self.line}: "
        elif self.header_line is not None:
            where = f"header line {self.header_line}: "
        return f"{where}{self.message}" + (f": {self.text.strip()}" if self.text else "")


@dataclass
class Report:
    """What the check found, and the bytes of each threadgroup variable declared."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    threadgroup: dict[str, int] = field(default_factory=dict)

    @property
    def threadgroup_bytes(self) -> int:
        """Their sum."""
        return sum(self.threadgroup.values())


def _declare(base: str, name: str, suffix: str, _number: int) -> str:
    attribute = f'__attribute__((section("{SECTION}"), used))'
    return f"static {attribute} threadgroup {base} {name}{suffix};"


DIALECT = Dialect(_declare, lambda name: f"metal::emu_make<{name}>")


def frontend_check(text: KernelText | str, house_rules: bool = True) -> list[Diagnostic]:
    """The complaints about a generated text (``MetalKernel.generate``), an empty list if none.

    clang compiles it as C++14 with real address spaces, warnings as errors. Beyond that: no double,
    no lambda, no pointer or reference without an address space, threadgroup variables only in the
    kernel, without initialiser, of at most 32,768 bytes together. Narrowing to half needs a cast,
    as narrowing to bfloat does. House rules, which Metal would not ask: every floating literal has
    a suffix, and nothing returns above a barrier.

    Raises:
        UserError: no clang of version 17 or newer on this machine, and no ziglang wheel.
    """
    return check(text, house_rules).diagnostics


def check(text: KernelText | str, house_rules: bool = True) -> Report:
    """As ``frontend_check``, with the sizes of the threadgroup variables."""
    if isinstance(text, str):
        lines = text.count("\n") + 1
        text = KernelText(text, "", (), header_lines=0, source_first=1, source_lines=lines)
    report = Report()

    def add(line: int, message: str) -> None:
        diagnostic = Diagnostic(message, **text.locate(line))
        if diagnostic not in report.diagnostics:
            report.diagnostics.append(diagnostic)

    for line, message in lint(text, house_rules):
        add(line, message)
    try:
        rewritten = rewrite(text.text, DIALECT)
    except Unsupported as error:
        add(error.line, error.message)
        return report
    with tempfile.TemporaryDirectory() as work:
        messages, assembly = compile_text(rewritten.text, NAME, Path(work))
    _read_messages(messages, add)
    report.threadgroup = _sizes(assembly)
    if report.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        parts = ", ".join(f"{name} {size}" for name, size in report.threadgroup.items())
        report.diagnostics.append(
            Diagnostic(
                f"{report.threadgroup_bytes} bytes of threadgroup memory, the limit is "
                f"{MAX_THREADGROUP_BYTES} ({parts})"
            )
        )
    return report


def _read_messages(messages: str, add: Callable[[int, str], None]) -> None:
    """Errors in the kernel's text; one in a header is reported at the line that led there."""
    pending: str | None = None
    for line in messages.split("\n"):
        found = re.match(r"(.*?):(\d+):\d+: (?:fatal )?(error|note): (.*)", line)
        if not found:
            continue
        file, number, kind, message = found.groups()
        ours = file.endswith(NAME)
        if kind == "error":
            if pending:
                add(0, pending)
            pending = None if ours else message
            if ours:
                add(int(number), message)
        elif pending and ours:
            add(int(number), pending)
            pending = None
    if pending:
        add(0, pending)


def _sizes(assembly: str) -> dict[str, int]:
    """Bytes of the variables in the threadgroup section of an assembly listing."""
    sizes: dict[str, int] = {}
    inside = False
    for line in assembly.split("\n"):
        if re.match(r"\s*\.(section|text|data|bss)\b", line):
            inside = SECTION in line
        found = re.match(r"\s*\.size\s+(\S+), (\d+)", line)
        if found and inside:
            sizes[_variable(found.group(1))] = int(found.group(2))
    return sizes


def _variable(symbol: str) -> str:
    """The name of a local variable, which ends its mangled symbol as E<length><name>[_<number>]."""
    for found in re.finditer(r"E(\d+)", symbol):
        name = symbol[found.end() : found.end() + int(found.group(1))]
        if re.fullmatch(r"(_\d+)?", symbol[found.end() + len(name) :]):
            return name
    return symbol
