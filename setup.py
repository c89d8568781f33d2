"""Builds the library of CPU kernels; everything else is in pyproject.toml.

One shared library, loaded by ctypes, so that one wheel serves every Python: each source file once
for each instruction set. Where it cannot be built the installation goes on without it.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("kernels").glob("*.cpp") if path.stem != "isa")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    # IEEE arithmetic throughout: kernels and definitions agree bit for bit.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS = {
        "v2": ["-march=x86-64-v2"],
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    }
else:
    INSTRUCTION_SETS = {"base": []}


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return "/".join([*fullname.split(".")[:-1], "libcommhooks_kernels.so"])

    def build_extension(self, ext: Extension) -> None:
        objects = self.compiler.compile(
            ["kernels/isa.cpp"], output_dir=self.build_temp, extra_postargs=list(FLAGS)
        )

        def compile_for(name: str) -> list[str]:
            return self.compiler.compile(
                SOURCES,
                output_dir=f"{self.build_temp}/{name}",
                macros=[("ISA", name)],
                extra_postargs=[*FLAGS, *INSTRUCTION_SETS[name]],
                depends=ext.depends,
            )

        with ThreadPoolExecutor() as pool:
            objects += [one for made in pool.map(compile_for, INSTRUCTION_SETS) for one in made]
        # Linked as C: nothing of the C++ run-time library is used.
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-s"]
        )


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "commhooks.kernels._library",
            SOURCES,
            depends=sorted(str(path) for path in Path("kernels/include").glob("*.h")),
            language="c++",
            optional=True,
        )
    ],
)
