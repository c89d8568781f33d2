"""The wheel and the editable install give the same three import names and nothing else."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from types import MappingProxyType

import pytest
from packaging.requirements import Requirement

from tests import builds
from tests.packaging.scripts import REFUSES, TRAINS
from tests.unit.test_docs import BLOCK, PRELUDE

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
NOTHING = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
# Prints where the packages lie.
SCRIPT = """
import commhooks, commhooks.classic, commhooks.kernels, ddp_core
print(commhooks.__file__, commhooks.kernels.__file__, ddp_core.__file__, sep="\\n")
assert commhooks.make("powersgd", rank=2).traits.rounds == 2
"""
# Says by what kernels a scheme runs, and which warnings that gives.
WARNED = """
import warnings, torch, commhooks
def rounds():
    simulation = commhooks.Simulation("int4", {"p": (1000,)}, world_size=2)
    for _ in range(3):
        simulation.step([torch.ones(1000)] * 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rounds()
print(*[f"{warning.category.__name__}: {warning.message}" for warning in caught], sep="\\n")
print(commhooks.kernels.implementations("cpu")["quantize"])
"""


def run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """Returns what a command prints to its two streams."""
    done = subprocess.run(
        list(map(str, command)),
        # Without PYTHONPATH, by which some run these tests from the source tree.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,  # of compiling, above all
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


class Environment:
    """A virtual environment that finds the packages of the running one, but not commhooks.

    A path in a ``.pth`` file is searched for modules; the ``.pth`` files in it, those of editable
    installations, are not read. pip looks at all, but removes nothing outside of its environment.
    """

    def __init__(self, folder: Path, *, only: Sequence[str] = ()) -> None:
        """Makes it; ``only`` names the packages that it finds, beside what these need."""
        venv.create(folder, symlinks=True, with_pip=False)
        self.folder, self.python = folder, folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        if only:
            for name, place in modules_of(only).items():
                (self.packages / name).symlink_to(place)
            return
        running = [
            path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
        ]
        (self.packages / "running.pth").write_text("\n".join(running) + "\n")

    def install(self, *packages: str | Path) -> None:
        options = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--python", self.python, "install", *options, *packages, cwd=self.folder)

    def imported(self) -> list[Path]:
        lines, _ = run(self.python, "-c", SCRIPT, cwd=self.folder)
        return [Path(line) for line in lines.splitlines()]


def modules_of(names: Sequence[str]) -> dict[str, Path]:
    """Finds what these packages, and all that they need, install in the running environment."""
    packages: dict[str, Path] = {}
    seen, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for file in package.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth"):
                packages[top] = Path(str(package.locate_file(top)))
        wanted = [Requirement(requirement) for requirement in requires(name) or []]
        waiting += [value.name for value in wanted if not value.marker or value.marker.evaluate()]
    return packages


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """With torch and numpy only."""
    return Environment(tmp_path / "bare", only=["torch", "numpy"])


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def installation() -> list[tuple[str, bool]]:
    """The files of the running environment's commhooks, and whether they are there."""
    try:
        files = distribution("commhooks").files or []
    except PackageNotFoundError:
        return []
    return [(str(file), Path(str(file.locate())).exists()) for file in files]


@pytest.fixture(scope="module", autouse=True)
def _the_running_environment_stays() -> Iterator[None]:
    before = installation()
    yield
    assert installation() == before


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, since setuptools writes into the tree it builds from."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("commhooks", "ddp_core", "kernels"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True)
    for built in [*tree.rglob("*.so"), *tree.rglob("not_built.txt")]:
        built.unlink()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def build(tree: Path, environment: Mapping[str, str] = MappingProxyType({})) -> tuple[Path, str]:
    """The wheel of a source tree, and what was said meanwhile."""
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    output = "\n".join(run(*command, cwd=tree, environment=environment))
    (built,) = (tree / "dist").glob("*.whl")
    return built, output


def unoptimized(folder: Path) -> dict[str, str]:
    """A compiler that takes a third of the time."""
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    return {"CC": str(compiler), "CXX": str(compiler)}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("quick", "full")],
)
def wheel(request: pytest.FixtureRequest, source: Path) -> Path:
    """One for all workers; as it is published in ``make test-all``."""

    def make(tree: Path) -> None:
        shutil.copytree(source, tree, symlinks=True)
        build(tree, unoptimized(tree) if request.param == "quick" else {})

    (wheels,) = (builds.built(f"wheel-{request.param}", make) / "dist").glob("*.whl")
    return wheels


def test_all_packages_are_named() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    at = {place: name for name, place in project["package-dir"].items()}
    results = set()
    for top in ("commhooks", "ddp_core", "kernels"):
        for file in (ROOT / top).rglob("__init__.py"):
            if not (ROOT / top).is_symlink():
                place = file.parent.relative_to(ROOT).as_posix()
                results.add(at.get(place, place.replace("/", ".")))
    assert results == set(project["packages"])


def test_a_wheel_runs_with_torch_and_numpy_only(wheel: Path, bare: Environment) -> None:
    bare.install(wheel)
    refused, _ = run(bare.python, "-c", TRAINS + REFUSES, cwd=bare.folder)
    assert refused.count("which cannot be imported (No module named ") == 8
    needed = [(line.split(" needs ")[0], line.split()[-1]) for line in refused.splitlines()]
    assert needed == [
        *[("hook.report()", "pandas")] * 2,
        *(("Timeline.frame()", "pandas"), ("Timeline.plot()", "matplotlib")),
        *(("Traced(...)", "safetensors"), ("Trace(...)", "safetensors")),
        *(("replay(...)", "pandas"), ("allocate(...)", "pandas")),
    ]
    printed, _ = run(bare.python, ROOT / "tests" / "packaging" / "smoke.py", cwd=bare.folder)
    assert printed.startswith(str(bare.packages))
    assert "int8: bits as in PyTorch" in printed
    done = subprocess.run(
        [bare.folder / "bin" / "commhooks", "--version"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=bare.folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "commhooks: the command line needs rich and typer, which cannot be imported "
        "(No module named 'typer'): pip install rich typer"
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_runs_with_torch_and_numpy_only(page: str, bare: Environment) -> None:
    """The tree stands for its wheel. A block that needs more says what to install."""
    (bare.packages / "tree.pth").write_text(f"{ROOT}\n")
    blocks = BLOCK.findall((ROOT / page).read_text())
    script = bare.folder / "page.py"
    script.write_text(f"""
import commhooks
names = {{}}
for block in {[PRELUDE, *blocks]!r}:
    try:
        exec(block, names)
    except commhooks.errors.MissingPackageError as error:
        print("refused:", error)
""")
    printed, _ = run(bare.python, script, cwd=bare.folder)
    refused = [line for line in printed.splitlines() if line.startswith("refused: ")]
    assert all(": pip install " in line for line in refused)
    assert len(refused) < len(blocks) / 2
    assert " on 1 rank" in printed or page == "README.md"


def test_a_wheel_installs_and_imports(wheel: Path, environment: Environment) -> None:
    environment.install(wheel)
    for file in environment.imported():
        assert file.is_relative_to(environment.packages)
    printed, _ = run(environment.python, "-c", WARNED, cwd=environment.folder)
    assert printed.split() == ["kernel"]
    printed, _ = run(environment.folder / "bin" / "commhooks", "--version", cwd=environment.folder)
    assert printed.startswith("commhooks ")
    assert "on the CPU: kernels, " in printed


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
    assert wheel.stat().st_size < 1_500_000
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("commhooks/kernels/libcommhooks_kernels.so", tmp_path)
        for name in ("blockwise.cu", "include/portable.h"):
            assert f"commhooks/kernels/{name}" in archive.namelist()
    symbols, _ = run("nm", "--dynamic", "--undefined-only", library, cwd=tmp_path)
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)]
    assert max(versions) <= (2, 17)  # manylinux2014
    assert "GLIBCXX" not in symbols
    assert "CXXABI" not in symbols
    symbols, _ = run("nm", "--dynamic", "--defined-only", library, cwd=tmp_path)
    if platform.machine() == "x86_64":  # also where the machine that builds lacks AVX-512
        assert set(re.findall(r" quantize_(v\d)$", symbols, re.MULTILINE)) == {"v3", "v4"}
    needed, _ = run("readelf", "--dynamic", library, cwd=tmp_path)
    assert re.findall(r"\(NEEDED\).*\[(.*)\]", needed) == ["libc.so.6"]
    assert "PATH" not in needed  # of the machine that built it


@pytest.mark.slow
def test_without_a_compiler_it_says_so_and_runs_pytorch_code(
    source: Path, tmp_path: Path, environment: Environment
) -> None:
    tree = tmp_path / "source"
    shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns("build", "dist"))
    built, output = build(tree, NOTHING)
    assert "WARNING: commhooks is installed WITHOUT its CPU kernels" in output
    assert "no-such-compiler: No such file or directory" in output
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]

    environment.install(built)
    printed, _ = run(environment.python, "-c", WARNED, cwd=environment.folder)
    warned, implementation = printed.splitlines()
    for words in ("RuntimeWarning: commhooks.kernels: PyTorch code runs", "no-such-compiler"):
        assert words in warned
    assert "from its source folder: 'pip install --force-reinstall --no-deps .'" in warned
    assert "was installed without its CPU kernels" in implementation
    forced = {"COMMHOOKS_KERNELS": "definition"}
    printed, _ = run(environment.python, "-c", WARNED, cwd=environment.folder, environment=forced)
    assert printed.strip() == "definition: asked for"


def test_a_file_that_does_not_compile_is_named(source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "source"
    shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns("build", "dist"))
    (tree / "kernels" / "runtime" / "isa.cpp").write_text("int nonsense = here;\n")
    built, output = build(tree)
    assert "failed on kernels/runtime/isa.cpp, exit 1" in output
    assert re.search(r"error: .*here", output)
    assert built.name.endswith("-py3-none-any.whl")


def test_metadata_states_versions_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.10"
    requires = metadata.get_all("Requires-Dist")
    assert [requirement for requirement in requires if "extra ==" not in requirement] == [
        "torch>=2.11",
        "numpy",
    ]
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"report", "cli", "trace", "plot", "all", "cuda12", "cuda13"} <= extras
    assert 'cupy-cuda12x; extra == "cuda12"' in requires
    assert 'cupy-cuda13x; extra == "cuda13"' in requires
    assert 'typer; extra == "cli"' in requires


@pytest.mark.slow
def test_an_editable_install_imports_from_the_source_tree(
    source: Path, environment: Environment
) -> None:
    environment.install("--editable", source)
    package, kernels, core = environment.imported()
    assert package == source / "commhooks" / "__init__.py"
    assert core == source / "ddp_core" / "__init__.py"
    assert kernels.resolve() == source / "kernels" / "__init__.py"
    assert (source / "kernels" / "libcommhooks_kernels.so").exists()
