"""What is installed: the wheel's contents, the public names, and an import that costs nothing."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from helpers.paths import ROOT

import mlx_kda

NAMES = ("kda", "kda_ref", "kda_chunk_ref", "softplus_gate", "bounded_gate", "explain", "load")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree; built from a copy, where no older build folder can join in."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("mlx_kda", "convert", "metal"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(tree)], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(folder, *patterns):
    files = {file for pattern in patterns for file in (ROOT / folder).rglob(pattern)}
    return {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}


def test_the_wheel_holds_every_source_file(contents):
    package = sources("mlx_kda", "*.py", "*.h", "*.cpp", "*.metal")
    convert = {f"mlx_kda/{name}" for name in sources("convert", "*.py")}
    metal = {f"mlx_kda/{name}" for name in sources("metal", "*.metal", "*.h")}
    assert len(convert) > 3 and metal, "the folders behind the links were found"
    assert (package | convert | metal) <= contents


def test_the_wheel_claims_one_top_level_name(contents):
    """No module called convert or metal lands in anybody's site-packages."""
    assert {name.split("/")[0].split("-")[0] for name in contents} == {"mlx_kda"}
    assert not any(name.endswith(".pyc") for name in contents)


def test_the_wheel_asks_for_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert 'Requires-Dist: mlx<0.33,>=0.32.4; sys_platform == "darwin"' in metadata
    assert 'Requires-Dist: mlx[cpu]<0.33,>=0.32.4; sys_platform == "linux"' in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    core = [line for line in needed if "extra ==" not in line]
    assert not any("torch" in line for line in core)


# Where a library's name is not that of its module, and what only an extra or a CUDA machine has.
DISTRIBUTIONS = {"google": "protobuf", "mlx_lm": "mlx-lm"}
UNSEEN = {"jinja2"}  # chat templates need it in transformers, which does not ask for it
OPTIONAL = {"matplotlib", "prompt_toolkit", "torch", "triton", "fla", "flash_kda"}


def test_every_import_is_declared():
    """What the package imports it asks for itself, not by way of another's dependencies."""
    imported = set()
    for path in (*(ROOT / "mlx_kda").rglob("*.py"), *(ROOT / "convert").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"mlx_kda"} - OPTIONAL
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.match(r"[\w-]+", line).group() for line in wanted}
    assert {"mlx", "numpy", "transformers"} <= foreign
    used = {DISTRIBUTIONS.get(name, name) for name in foreign}
    assert used <= declared
    # safetensors was asked for, which only tests and examples import: files are read by offsets
    assert declared - used <= UNSEEN


def test_the_program_and_the_version_are_those_of_the_distribution():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="mlx-kda")
    assert entry.value == "mlx_kda.cli.main:main" and callable(entry.load())
    assert importlib.metadata.version("mlx-kda") == mlx_kda.__version__


def test_public_names():
    assert all(callable(getattr(mlx_kda, name)) for name in NAMES) and set(NAMES) <= {*dir(mlx_kda)}
    with pytest.raises(AttributeError, match="frobnicate"):
        mlx_kda.frobnicate  # noqa: B018


def test_importing_costs_nothing():
    """``import mlx_kda`` loads no other library and prints nothing."""
    code = (
        "import sys\nbefore = set(sys.modules)\nimport mlx_kda\n"
        "roots = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not roots & {'mlx', 'mlx_lm', 'numpy', 'transformers', 'rich'}, roots"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
