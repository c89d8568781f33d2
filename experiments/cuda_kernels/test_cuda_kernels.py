"""The table of machine code, and the reading of loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.cuda_kernels import sass as of_sass
from experiments.cuda_kernels.__main__ import describe, expected_share, resident_threads
from experiments.cuda_kernels.sass import Loop, find_nvdisasm, loops_of, main_loop

SASS = """
.text._Z1fPf:
_Z1fPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   IADD3 R6, R6, 0x1, RZ ;
.L_x_0:
        /*0020*/              @!P3 LDG.E R35, desc[UR6][R2.64+-0x200] ;
        /*0030*/                   LDG.E.128 R8, desc[UR6][R2.64] ;
        /*0040*/                   CALL.REL.NOINC `($__internal_0_$__div) ;
        /*0050*/              @!P1 STG.E.U8 desc[UR6][R2.64], RZ ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/               @P2 BRA `(.L_x_2) ;
.L_x_1:
        /*0090*/                   EXIT ;
        .weak           $__internal_0_$__div
$__internal_0_$__div:
        /*00a0*/                   IMAD.MOV.U32 R18, RZ, RZ, R8 ;
        /*00b0*/                   RET.REL.NODEC R10 `(_Z1fPf) ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
"""


def test_loops_and_their_accesses_are_counted() -> None:
    loops = loops_of(SASS, "_Z1fPf")
    assert len(loops) == 2
    # A call counts the two instructions of the function as well; 128 bits are four words.
    assert main_loop(loops) == Loop(2, 6, 7, loads=5, stores=1, loaded=20, stored=1)


@pytest.mark.parametrize(
    ("registers", "shared", "threads"),
    [(40, 0, 1536), (80, 0, 768), (168, 0, 256), (32, 0, 2048), (16, 40_000, 1280)],
)
def test_threads_of_a_multiprocessor(registers: int, shared: int, threads: int) -> None:
    assert resident_threads(registers, shared) == threads


def test_the_model_of_a_share() -> None:
    loop = Loop(0, 1, instructions=160, loads=16, stores=0, loaded=64, stored=0)
    # 64 warps issue 16 cycles apart, 8 warps every other cycle.
    share = 2048 * 64 / (0.8 + 160 * 16 / 1755) / (4.3e6 / 132)
    assert expected_share(loop, 2048) == min(1.0, share)
    share = 256 * 64 / (0.8 + 160 * 2 / 1755) / (4.3e6 / 132)
    assert expected_share(loop, 256) == pytest.approx(share)
    assert share == pytest.approx(0.512, abs=1e-3)


def test_a_row_has_registers_and_says_where_loops_are_not_counted() -> None:
    row = describe("finite.cu", "finite<float>", "90", None)
    assert 16 <= row["registers"] <= 128
    assert row["threads per multiprocessor"] >= 512
    assert row["spilled bytes"] == 0
    assert row["loop instructions"] is None


def test_nvdisasm_is_found_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(of_sass.sys, "path", [str(tmp_path)])
    assert find_nvdisasm() is None
    program = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    program.parent.mkdir(parents=True)
    program.touch()
    assert find_nvdisasm() == str(program)


@pytest.mark.skipif(find_nvdisasm() is None, reason="nvdisasm is not installed")
def test_loops_of_real_machine_code() -> None:
    row = describe("finite.cu", "finite<float>", "90", find_nvdisasm())
    assert 4 <= row["instructions per access"] <= 30
    assert 0.2 <= row["share"] <= 1
