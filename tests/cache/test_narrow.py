"""Pages of int8 and e4m3 that kernels read two columns at a time: their results in Triton's interpreter, and the machine code."""

from __future__ import annotations

import pytest

from tests.backends.test_triton_interpreter import interpret
from tests.interpreter import needs_interpreter

OFTEN = (
    *("int8, scale of a tensor", "int8, fp16, scale of a token", "int8, d80", "int8, heads before places", "int8, latent in two"),
    *("e4m3, scale of a head", "e4m3, scale of a token", "e4m3, one head", "e4m3, latent", "e4m3, odd dims", "e4m3, softcap"),
    *("e4m3, gaps", "int8, sinks", "e4m3, in parts", "invariant", "all numbers", "wide queries", "light weights"),
)
"""Cases that tests run; the others are neighbours of these, and the interpreter takes seconds for each."""


@needs_interpreter
@pytest.mark.parametrize("share", range(2))
def test_narrow_pages_in_the_interpreter(share: int) -> None:
    interpret("tests.cache.narrow", *OFTEN[share::2])


@pytest.mark.parametrize(("name", "most"), [("int8", 800), ("float8", 620)])
def test_bytes_are_not_read_one_by_one(name: str, most: int) -> None:
    """Decoding with head dim 128 on an H200: 128 keys take 743 and 573 instructions, those of bf16 428. Byte by byte, with a
    conversion for each number, it was 1,318 and 1,306."""
    pytest.importorskip("triton")
    from tools.compile_checks import BY_NAME
    from tools.compile_kernels import compile_check, faults

    check = BY_NAME[f"triton pages of {name}"]
    (compiled,) = compile_check(check, "sm_90", ("decode",))
    known, wrong = faults(check, compiled, "sm_90")
    assert wrong == [] and len(known.loops) == 2
    for loop in known.loops:
        assert not loop.count("LDS.U8", "F2F.", "I2F", "LDL", "STL") and loop.count("LDSM") >= 32
    assert len(known.loops[0].body) <= most
