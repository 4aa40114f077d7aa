"""Limits of a Metal kernel, read off the sources: memory, threads, characters, buffers."""

import re
import shutil
import subprocess

import pytest

from mlx_kda.kernels import chunk, recurrent
from mlx_kda.kernels.decode import simd_groups, token_capacity
from mlx_kda.kernels.epilogue import ROWS
from mlx_kda.kernels.sources import SOURCES

DIMS = range(32, 257, 32)
METAL_BYTES, METAL_THREADS, METAL_BUFFERS = 32768, 1024, 31
# What makes the constants of a kernel's body compile as plain C++.
PRELUDE = """
#include <cstdio>
struct float4 { float x[4]; };
struct half { short x; };
template <class T, int N> struct vec { T x[N]; };
"""


def declarations(source):
    """The body's constants and threadgroup arrays, in order, as C++ that adds up the bytes."""
    lines = []
    for line in source.body.splitlines():
        constant = re.match(r"(constexpr int|typedef) .*;", line)
        array = re.match(r"threadgroup (\w+) (\w+)\[(.*)\];", line)
        if constant:
            lines.append(constant.group().replace("int(", "(int)("))
        elif array:
            lines.append(f"total += sizeof({array[1]}) * ({array[3]});")
        elif line.startswith("threadgroup "):
            assert re.match(r"threadgroup float\* \w+ = ", line), line
    return lines


def instantiations(name):
    """C++ template arguments (OpT, Dk, Dv, SG) of every instantiation, and its threads."""
    threads = {
        "kda_prologue": 96,
        "kda_recurrent": recurrent.THREADS,
        "kda_chunk_prepare": chunk.THREADS,
        "kda_chunk_scan": chunk.SCAN_THREADS,
        "kda_epilogue": 32 * ROWS,
    }
    for Dk in DIMS:
        for Dv in DIMS:
            for operand in ("float", "half"):
                groups = simd_groups(Dv)
                yield (operand, Dk, Dv, groups), threads.get(name, 32 * groups)


@pytest.fixture(scope="module")
def threadgroup_bytes(tmp_path_factory):
    """(kernel, arguments) -> bytes, computed by a C++ compiler from the declarations."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to evaluate the declarations with")
    code = [PRELUDE]
    enums = {e for s in SOURCES.values() for e in re.findall(r"enum \w+ \{.*?\};", s.header, re.S)}
    code += sorted(enums)
    calls = []
    for name, source in SOURCES.items():
        body = "\n".join(declarations(source))
        code.append(
            f"template <class OpT, int Dk, int Dv, int SG> int {name}() "
            f"{{ int total = 0;\n{body}\nreturn total; }}"
        )
        for args, _ in instantiations(name):
            spelled = ", ".join(map(str, args))
            calls.append(f'printf("{name}|{spelled}|%d\\n", {name}<{spelled}>());')
    code.append("int main() {\n" + "\n".join(calls) + "\n}")
    folder = tmp_path_factory.mktemp("limits")
    (folder / "bytes.cpp").write_text("\n".join(code))
    program = folder / "bytes"
    subprocess.run([compiler, "-w", "-o", str(program), str(folder / "bytes.cpp")], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in lines.splitlines():
        name, args, total = line.split("|")
        found[name, args] = int(total)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_threadgroup_memory_of_every_instantiation(name, threadgroup_bytes):
    """32,768 bytes are the limit; the head of a file names its own number."""
    sizes = {args: total for (kernel, args), total in threadgroup_bytes.items() if kernel == name}
    assert len(sizes) == 128
    assert max(sizes.values()) <= METAL_BYTES, max(sizes, key=sizes.get)
    source = SOURCES[name]
    everywhere = re.findall(r"\bthreadgroup \w+ \w+\[", source.header + source.body)
    assert len(everywhere) == sum(line.startswith("total") for line in declarations(source))
    said = source.body.split("// Threadgroup bytes:")[1].split("// Order of reductions:")[0]
    at_128 = sizes["float, 128, 128, 8"]
    assert re.search(rf"\b{at_128:,}\b", said), f"the head should say {at_128:,}"


@pytest.mark.parametrize("name", SOURCES)
def test_threads_of_every_instantiation(name):
    """An over-limit launch is dropped without a word on some systems."""
    assert max(threads for _, threads in instantiations(name)) <= METAL_THREADS // 2


@pytest.mark.parametrize("name", ["kda_recurrent", "kda_chunk_prepare", "kda_chunk_scan"])
def test_the_head_of_a_file_names_the_threads_of_its_launch(name):
    """What the wrapper launches, not what it did once: the scan has had 4 SIMD-groups."""
    (threads,) = {threads for _, threads in instantiations(name)}
    body = SOURCES[name].body
    assert f"a threadgroup of {threads // 32} SIMD-groups" in body
    assert re.search(rf"\({threads} \* (Dv/32|chunks), B\*Hv\)", body)


@pytest.mark.parametrize("name", SOURCES)
def test_metal_takes_the_text(name):
    """ASCII; at most 31 buffers; no return in a body, no lambda."""
    source = SOURCES[name]
    text = source.header + source.body
    assert text.isascii()
    assert len(source.inputs) + len(source.outputs) <= METAL_BUFFERS
    assert not re.search(r"\breturn\b", source.body)
    assert "[&]" not in text and "[=]" not in text


def test_token_capacity_is_the_kernel_s():
    body = SOURCES["kda_decode"].body
    rule = re.search(r"constexpr int TCAP = 3 \* Dk \+ 2 \* Dv <= (\d+) \? (\d+) : (\d+);", body)
    limit, many, few = map(int, rule.groups())
    for Dk in DIMS:
        for Dv in DIMS:
            assert token_capacity(Dk, Dv) == (many if 3 * Dk + 2 * Dv <= limit else few)
