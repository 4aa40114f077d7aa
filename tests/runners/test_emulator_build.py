"""How the emulator builds kernels: the cache on disk, and what it says when it cannot."""

import importlib.util
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers.launch import launch

from mlx_kda.errors import UserError
from mlx_kda.runners import KernelFault
from mlx_kda.runners.emulator import compiler


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels."""
    monkeypatch.setattr(compiler, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def call(factor=2, runner="emulator-fast"):
    source = f"uint i = thread_position_in_grid.x; out[i] = a[i] * {factor};"
    return launch(source, [mx.ones(8)], runner=runner).tolist()


def test_compiled_kernels_are_kept_by_content(cache, monkeypatch):
    assert call(2) == [2] * 8
    kept = list(cache.rglob("*.so"))
    assert len(kept) == 1 and not list(cache.rglob("tmp*"))
    monkeypatch.setattr(compiler, "_run", lambda *_: pytest.fail("compiled again"))
    assert call(2) == [2] * 8
    monkeypatch.undo()


def test_another_text_or_mode_is_another_program_and_a_deleted_cache_is_made_again(cache):
    call(2)
    call(3)
    call(2, "emulator")
    assert len(list(cache.rglob("*.so"))) == 3
    shutil.rmtree(cache)
    assert call(5) == [5] * 8


def test_a_kernel_that_does_not_compile_leaves_nothing(cache):
    with pytest.raises(KernelFault, match="unsupported"):
        call("frobnicate(1)")
    assert not list(cache.rglob("*.so")) and not list(cache.rglob("tmp*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(compiler, "cache_dir", lambda: blocked)
    with pytest.raises(UserError, match=f"cannot write compiled kernels to {blocked}"):
        call(7)


def test_without_a_compiler_the_error_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILERS", ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for cached in (compiler.compiler, compiler._fingerprint):
        cached.cache_clear()
    try:
        with pytest.raises(UserError, match=r"needs a C\+\+ compiler .* install one"):
            call(9)
    finally:
        monkeypatch.undo()
        for cached in (compiler.compiler, compiler._fingerprint):
            cached.cache_clear()


@pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="no ziglang wheel")
@pytest.mark.parametrize("name", sorted({n for names in compiler.RUNTIME.values() for n in names}))
def test_the_runtime_compiles_for_a_mac(name, tmp_path):
    """Against macOS's own headers, which the ziglang wheel brings along."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos", "-c", "-w"]
    mode = next(mode for mode, names in compiler.RUNTIME.items() if name in names)
    flags = [*compiler.COMMON, f"-DEMU_MODE_{mode.upper()}=1", "-o", str(tmp_path / "made.o")]
    source = str(compiler.HERE / "runtime" / name)
    done = subprocess.run([*command, *flags, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
