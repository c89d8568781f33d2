"""Builds the library of CPU kernels; everything else is in pyproject.toml.

One shared library, loaded by ctypes, so that one wheel serves every Python: each source file once
for each instruction set. Where it cannot be built the installation goes on without it, says so,
and leaves the reason in a file beside where the library would be; the wheel is one for any machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

LIBRARY, REASON = "libcommhooks_kernels.so", "not_built.txt"
SOURCES = sorted(str(path) for path in Path("kernels").glob("*.cpp"))
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    "-fno-asynchronous-unwind-tables",  # nothing unwinds through them
    "-g0",  # Python's own flags ask for what a debugger needs: a third of the time, then stripped
    # IEEE arithmetic throughout: kernels and definitions agree bit for bit.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
SHOWN = 12  # lines of what a compiler said last


def machine() -> str:
    """The architecture to compile for. On macOS ARCHFLAGS names it, as cibuildwheel does."""
    if sys.platform != "darwin":
        return platform.machine()
    named = os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
    return named.split()[-1]


if machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS = {
        "v3": ["-march=x86-64-v3"],  # AVX2; PyTorch code runs on processors without it
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    }
else:
    INSTRUCTION_SETS = {"base": []}
if sys.platform == "darwin":  # instruction sets are those of one architecture
    target = str(sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET") or "11.0")
    target = os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", target)
    # The wheel's tag: of a Python for two architectures it would name both.
    os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{target}-{machine()}")


def runs_here(name: str) -> bool:
    """Says whether this machine runs an instruction set; without /proc/cpuinfo, every one."""
    cpus = Path("/proc/cpuinfo")
    return name != "v4" or not cpus.exists() or "avx512vl" in cpus.read_text().split()


def run_compiler(command: list[str], **_: object) -> None:
    """Runs it as setuptools would, and raises with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return
    file = next((argument for argument in command if argument.endswith(".cpp")), "the library")
    last = "\n".join((done.stdout + done.stderr).splitlines()[-SHOWN:])
    raise CompileError(f"{command[0]} failed on {file}, exit {done.returncode}:\n{last}")


class BuildKernels(build_ext):
    def run(self) -> None:
        self.in_tree = bool(self.inplace or self.editable_mode)  # which super() changes
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return "/".join([*fullname.split(".")[:-1], LIBRARY])

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        reason = library.with_name(REASON)
        reason.unlink(missing_ok=True)
        try:
            self.compiler.spawn = self.compiler.call = run_compiler  # its name by version
            self.build_library(ext, str(library))
        except (CCompilerError, ExecError, PlatformError) as error:
            library.unlink(missing_ok=True)  # of an earlier build
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{error}\n", encoding="utf-8")
            self.go_on_without(f"{error}")

    def copy_extensions_to_source(self) -> None:
        """For editable installations; a library of other sources does not stay."""
        super().copy_extensions_to_source()
        built, tree = Path(self.build_lib, "commhooks", "kernels", REASON), Path("kernels")
        (tree / REASON).unlink(missing_ok=True)
        if built.exists():
            self.copy_file(str(built), str(tree / REASON))
            (tree / LIBRARY).unlink(missing_ok=True)

    def build_library(self, ext: Extension, library: str) -> None:
        # A wheel is for any machine. A tree is for this one: half of the time, where v4 is missing.
        sets = [name for name in INSTRUCTION_SETS if not self.in_tree or runs_here(name)]
        objects = self.compiler.compile(
            ["kernels/runtime/isa.cpp"],
            output_dir=self.build_temp,
            macros=[("HAS_V4", str(int("v4" in sets)))],
            extra_postargs=list(FLAGS),
        )

        def compile_source(pair: tuple[str, str]) -> list[str]:
            name, source = pair
            return self.compiler.compile(
                [source],
                output_dir=f"{self.build_temp}/{name}",
                macros=[("ISA", name)],
                extra_postargs=[*FLAGS, *INSTRUCTION_SETS[name]],
                depends=ext.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(compile_source, product(sets, SOURCES))
            objects += chain.from_iterable(made)
        # The folder of the Python that builds is not one to search elsewhere.
        linker = self.compiler.linker_so
        self.compiler.linker_so = [
            argument for argument in linker if not argument.startswith("-Wl,-rpath")
        ]
        # Linked as C: nothing of the C++ run-time library is used.
        stripped = ["-s"] if sys.platform == "linux" else []
        self.compiler.link_shared_object(objects, library, extra_postargs=stripped)

    def go_on_without(self, reason: str) -> None:
        line = "*" * 79
        print(
            f"{line}\nWARNING: commhooks is installed WITHOUT its CPU kernels: PyTorch code runs in"
            f" their place,\nmany times slower. They need g++ or clang++ (CC and CXX name others)."
            f"\n\n{reason}\n{line}",
            file=sys.stderr,
            flush=True,
        )
        # Nothing of one machine is left, so neither is the wheel one for it.
        self.extensions = []
        self.distribution.ext_modules = []
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:
            wheel.root_is_pure = True


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "commhooks.kernels._library",
            SOURCES,
            depends=[
                *sorted(str(path) for path in Path("kernels/include").glob("*.h")),
                "kernels/runtime/isa.cpp",  # compiled once, not for each instruction set
            ],
            language="c++",
            optional=True,
        )
    ],
)
