"""From the address of an access in a shared object to the line of the kernel that made it."""

import ctypes
import re
import shutil
import subprocess


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _loaded_at(library) -> int:
    info = _DlInfo()
    entry = ctypes.cast(library.emu_run, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(entry, ctypes.byref(info)):
        return 0
    return info.base or 0


def line_of(path, library, pc, text_name) -> int:
    """The innermost line of ``text_name`` among the frames inlined at ``pc``, 0 if unknown."""
    base = _loaded_at(library)
    address = hex(pc - 1 - base)
    for tool in ("addr2line", "llvm-symbolizer", "llvm-addr2line"):
        found = shutil.which(tool)
        if not found:
            continue
        flags = ["--inlines", "-e" if "addr2line" in tool else "--obj", str(path), address]
        said = subprocess.run([found, *flags], capture_output=True, text=True).stdout
        lines = re.findall(rf"{re.escape(text_name)}:(\d+)", said)
        if lines:
            return int(lines[0])
    return 0
