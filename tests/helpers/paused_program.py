"""`mlx-kda`, which waits at a place of a test's choosing: the other side of helpers/paused.py.

    python paused_program.py PLACE FOLDER [arguments of mlx-kda]

At PLACE it makes FOLDER/there and goes on once there is FOLDER/go. The places:

    import:NAME   before that module is imported
    loading       before the weights are loaded
    reading       before the first tokens of a prompt are absorbed
    answering:N   once N pieces of text were written
    saving        when a session's file was begun
    writing:N     once N weight files of a conversion were finished
    calling:MODULE.FUNCTION:N   before that function's call number N, counted from 1
"""

import importlib
import sys
import time
from pathlib import Path

PLACE, _, DETAIL = sys.argv[1].partition(":")
FOLDER = Path(sys.argv[2])


def pause() -> None:
    """Wait at the place. Python's signal handlers run meanwhile, and may end the wait."""
    (FOLDER / "there").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)


def pause_before(owner: object, name: str, calls: int = 0, then=pause) -> None:
    """Let a function of a module or class wait at the call after so many."""
    real, before = getattr(owner, name), [calls]

    def paused(*args, **kwargs):
        before[0] -= 1
        if before[0] == -1:
            then()
        return real(*args, **kwargs)

    setattr(owner, name, paused)


class PausedImport:
    """A finder of modules that finds none and waits before one of them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == DETAIL and not (FOLDER / "there").exists():
            pause()
        return None


def prepare() -> None:
    """Put the wait where it belongs."""
    if PLACE == "import":
        sys.meta_path.insert(0, PausedImport)
    elif PLACE == "loading":
        from mlx_kda import models

        pause_before(models, "load_model")
    elif PLACE == "reading":
        from mlx_kda.context import Context

        pause_before(Context, "_absorb")
    elif PLACE == "answering":
        from mlx_kda.cli import output

        pause_before(output, "write", int(DETAIL))
    elif PLACE == "saving":
        from mlx_kda.cache import session_format

        real = session_format._write

        def begun(path, *args):
            path.write_bytes(b"begun")
            pause()
            return real(path, *args)

        session_format._write = begun
    elif PLACE == "writing":
        from mlx_kda.convert import conversion

        pause_before(conversion, "write_file", int(DETAIL))
    elif PLACE == "calling":
        function, _, count = DETAIL.partition(":")
        module, _, name = function.rpartition(".")
        pause_before(importlib.import_module(module), name, int(count) - 1)
    else:
        sys.exit(f"no place {PLACE}")


if __name__ == "__main__":
    prepare()
    from mlx_kda.cli.main import main

    sys.argv[1:] = sys.argv[3:]
    sys.exit(main())
