"""The wheel and the editable install give the same three import names and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from types import MappingProxyType

import pytest

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# Prints where the packages lie that pip put into the folder given first; forgets before those
# of the source tree given second, which the running tests import.
SCRIPT = """
import site, sys
own = "__editable___commhooks"
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith(own)]
for name in [name for name in sys.modules if name.startswith(own)]:
    del sys.modules[name]
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path != sys.argv[2])]
site.addsitedir(sys.argv[1])
import commhooks, commhooks.classic, commhooks.kernels, ddp_core
print(commhooks.__file__, commhooks.kernels.__file__, ddp_core.__file__, sep="\\n")
assert commhooks.make("powersgd", rank=2).rounds == 2
"""


def run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,  # of compiling, above all
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, since setuptools writes into the tree it builds from."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("commhooks", "ddp_core", "kernels"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True)
    for built in tree.rglob("*.so"):
        built.unlink()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def imported_from(folder: Path, cwd: Path) -> list[Path]:
    lines = run(sys.executable, "-c", SCRIPT, folder, ROOT, cwd=cwd).splitlines()
    return [Path(line) for line in lines]


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_a_wheel_installs_and_imports(wheel: Path, tmp_path: Path) -> None:
    run(*PIP, "install", "--no-deps", "--target", tmp_path / "lib", wheel, cwd=tmp_path)
    for file in imported_from(tmp_path / "lib", tmp_path):
        assert file.is_relative_to(tmp_path / "lib")


def test_a_wheel_holds_the_packages_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    tops = {name.split("/")[0] for name in files if ".dist-info" not in name}
    assert tops == {"commhooks", "ddp_core"}
    for name in ("commhooks/py.typed", "ddp_core/py.typed", "commhooks/kernels/low_rank.py"):
        assert name in files
    for layer, folder in (("commhooks", "commhooks"), ("commhooks/kernels", "kernels")):
        sources = {f"{layer}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert sources <= set(files)


def test_a_wheel_serves_every_python_and_old_systems(wheel: Path, tmp_path: Path) -> None:
    assert re.search(r"-py3-none-\w+\.whl$", wheel.name)
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("commhooks/kernels/libcommhooks_kernels.so", tmp_path)
        for name in ("blockwise.cu", "include/portable.h"):
            assert f"commhooks/kernels/{name}" in archive.namelist()
    symbols = run("nm", "--dynamic", "--undefined-only", library, cwd=tmp_path)
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)]
    assert max(versions) <= (2, 17)  # manylinux2014
    assert "GLIBCXX" not in symbols
    assert "CXXABI" not in symbols


def test_without_a_compiler_it_installs_and_says_so(source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "source"
    shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns("build", "*.so"))
    nothing = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    options = ["--no-deps", "--no-build-isolation", "--target", tmp_path / "lib"]
    run(*PIP, "install", *options, tree, cwd=tmp_path, environment=nothing)
    assert not list((tmp_path / "lib").rglob("*.so"))
    program = f"{SCRIPT}\nprint(commhooks.kernels.implementations('cpu')['quantize'])"
    printed = run(sys.executable, "-c", program, tmp_path / "lib", ROOT, cwd=tmp_path)
    assert "definition: the package was installed without its CPU kernels" in printed


def test_metadata_states_versions_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.10"
    requires = metadata.get_all("Requires-Dist")
    assert "torch>=2.9" in requires
    assert {"cuda12", "cuda13", "experiments", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert 'cupy-cuda12x; extra == "cuda12"' in requires
    assert 'cupy-cuda13x; extra == "cuda13"' in requires


def test_an_editable_install_imports_from_the_source_tree(source: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--prefix", tmp_path]
    run(*PIP, "install", *options, "--editable", source, cwd=tmp_path)
    (packages,) = tmp_path.rglob("site-packages")
    package, kernels, core = imported_from(packages, tmp_path)
    assert package == source / "commhooks" / "__init__.py"
    assert core == source / "ddp_core" / "__init__.py"
    assert kernels.resolve() == source / "kernels" / "__init__.py"
