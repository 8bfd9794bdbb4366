"""Machine code for every supported family, wherever the tests run: the inner loops of the products must not touch the stack."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("llvmlite")

from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import image, team
from tilewise.backends.cpu.spec import Kernel, Register
from tilewise.hardware.cpuid import core_figures
from tilewise.hardware.spec import DeviceSpec, KiB
from tilewise.model.cpu import register_tile, short_tile

LINUX = "-unknown-linux-gnu"
TARGETS = {
    "neoverse-n1": ("aarch64", "neoverse-n1", "neon", r"fmla\tv\d+\.4s, v\d+\.4s, v\d+\.s\["),
    "apple-m1": ("aarch64", "apple-m1", "neon", r"fmla(\.4s)?\tv\d+"),
    "x86-64-v3": ("x86_64", "x86-64-v3", "avx2", r"vfmadd\w+ps\t.*%ymm"),
    "skylake-avx512": ("x86_64", "skylake-avx512", "avx512", r"vfmadd\w+ps\t.*%zmm"),
    "sapphirerapids": ("x86_64", "sapphirerapids", "avx512", r"vfmadd\w+ps\t.*%zmm"),
}
PRODUCTS = {"forward": {"scores": 2, "values": 2}, "backward": {"product": 2, "accumulate": 1, "dq": 2}}
"""Functions and their innermost loops: a sum that may be cut has one for the first part and one for the others."""
STACK = re.compile(r"\(%rsp|\[sp\b")  # frame pointers are omitted: rbp and x29 are registers like any other
COPY = re.compile(r"^\s+(vmov[au]p[sd]\s+%[xyz]mm\d+, %[xyz]mm\d+$|mov\s+v\d+\.16b, v\d+\.16b)")


def tile_of(isa: str, head_dim: int = 0, rows: int = 0) -> Register:
    pipe, _ = core_figures(isa, "")
    spec = DeviceSpec(key="test", name="test", kind="cpu", vendor="", arch="", units=1, isa=isa, sram_bytes=48 * KiB, **pipe)
    micro, _ = register_tile(spec, 4, head_dim)
    if rows:
        micro = short_tile(spec, 4, micro, rows)
    return Register(spec.lanes(4), micro.row_vectors, micro.keys)


def innermost_loops(text: str) -> list[tuple[str, list[str]]]:
    """(function, lines) of every loop without another label inside."""
    lines = [re.split(r"\s*(#|//)", line)[0] for line in text.splitlines()]
    labels: dict[str, int] = {}
    loops, function = [], ""
    for number, line in enumerate(lines):
        if label := re.match(r"([\w.]+):", line):
            labels[label[1]] = number
            function = function if label[1].startswith(".L") else label[1]
        jump = re.match(r"\s+(?:j\w+|b\.\w+|b|cbn?z|tbn?z)\s.*?(\.LBB\w+)", line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] + 1 : number + 1]
            if not any(re.match(r"\.LBB", inner) for inner in body):
                loops.append((function, body))
    return loops


@pytest.mark.parametrize(
    ("target", "kind", "head_dim", "rows"),
    [
        *((target, kind, 0, 0) for target in TARGETS for kind in PRODUCTS),
        ("sapphirerapids", "forward", 128, 0),
        *((target, "forward", 0, rows) for target in ("neoverse-n1", "x86-64-v3", "skylake-avx512") for rows in (1, 8, 32)),
    ],
)
def test_products_stay_in_registers(target: str, kind: str, head_dim: int, rows: int) -> None:
    arch, cpu, isa, fma = TARGETS[target]
    tile = tile_of(isa, head_dim, rows)
    assert (tile.vectors, tile.keys) == (3, 8) or not head_dim, "a wide head dim has its own tile here"
    kernel = Kernel(kind, "float32", tile, "b")
    text = compiler.assembly(kernel, compiler.Machine(arch + LINUX, cpu, ""))
    wanted = tile.vectors * tile.keys
    found: Counter[str] = Counter()
    for function, body in innermost_loops(text):
        multiplies = sum(bool(re.search(fma, line)) for line in body)
        if function not in PRODUCTS[kind] or multiplies < wanted:
            continue
        found[function] += 1
        assert multiplies % wanted == 0, "a register tile is missing some of its products"
        assert not [line for line in body if STACK.search(line)], f"{function} spills"
        copies = [line for line in body if COPY.search(line)]
        assert len(copies) <= (rows > 0 and isa == "avx2"), f"{function} copies registers"  # low AVX2 tiles: one, renamed away
    assert found == PRODUCTS[kind], "the products' inner loops were not recognised"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", ["neoverse-n1", "x86-64-v3", "skylake-avx512", "sapphirerapids"])
def test_half_strips_stay_in_registers(target: str, head_dim: int) -> None:
    arch, cpu, isa, fma = TARGETS[target]
    tile = tile_of(isa, head_dim)
    machine = compiler.Machine(arch + LINUX, cpu, "")
    text = compiler.assembly(Kernel("forward", "float32", tile, "b"), machine)
    wanted, found = (tile.vectors + 1) // 2 * tile.keys, Counter[str]()
    for function, body in innermost_loops(text):
        multiplies = sum(bool(re.search(fma, line)) for line in body)
        if function in ("half_scores", "half_values") and multiplies >= wanted:
            found[function] += 1
            assert multiplies % wanted == 0
            assert not [line for line in body if STACK.search(line) or COPY.search(line)], function
    assert found == {"half_scores": 2, "half_values": 2}
    for kernel in (Kernel("forward", "float32", tile), Kernel("forward", "float32", tile, "b", invariant=True)):
        assert "half_scores" not in compiler.assembly(kernel, machine), "nothing is hidden, or sums must not depend on rows"


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_decoding_bytes_stays_in_registers(rows: int) -> None:
    """Bytes are four times as many numbers as a vector of them: they must not push sums out of the registers."""
    arch, cpu, _, _ = TARGETS["neoverse-n1"]
    kernel = Kernel("decode", "bfloat16", Register(4, 4 if rows == 4 else 8, rows), "b", varlen=True, paged=True, stored="int8")
    for together in (False, True):
        text = compiler.assembly(kernel._replace(together=together), compiler.Machine(arch + LINUX, cpu, ""))
        products = [body for name, body in innermost_loops(text) if name in ("block", "dots", "values")]
        products = [body for body in products if sum("fmla" in line for line in body) >= 8]
        assert len(products) >= 4, "both products, by strides and by rows, or key after key"
        assert not any(STACK.search(line) for body in products for line in body)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_products_of_bytes_are_nothing_else(rows: int) -> None:
    """Sixteen sums of four limbs, twelve of three, and no instruction on vectors beside them but loads."""
    arch, cpu, _, _ = TARGETS["neoverse-n1"]
    tile = Register(4, 4 if rows == 4 else 8, rows)
    kernel = Kernel("decode", "bfloat16", tile, "b", varlen=True, paged=True, stored="int8", together=True, bytes=True)
    text = compiler.assembly(kernel, compiler.Machine(arch + LINUX, cpu, ""))
    found = {}
    for function, body in innermost_loops(text):
        names = Counter(line.split()[0] for line in body)
        if function == "byte_values":
            assert not any(STACK.search(line) for line in body)
        elif names["sdot"]:
            found[names["sdot"]] = body
            assert set(names) <= {"sdot", "ldr", "ldp", "add", "cmp", "b.lt"}, names
            assert not any(STACK.search(line) for line in body)
    assert set(found) == {16, 12}


@pytest.mark.parametrize("target", ["sapphirerapids", "cascadelake", "alderlake"])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_products_of_bytes_are_nothing_else_on_x86(rows: int, target: str) -> None:
    """Columns of a key are spread by their load; where rows have ones, and where these have products of their own. Several rows
    of long vectors take a line of columns at once, and ask for lines of values meanwhile."""
    wide = target != "alderlake"
    tile = Register(16 if wide else 8, 4 if rows == 4 else 8, rows)
    kernel = Kernel("decode", "bfloat16", tile, "b", varlen=True, paged=True, stored="int8", together=True, bytes=True)
    text = compiler.assembly(kernel, compiler.Machine("x86_64" + LINUX, target, ""))
    assert "vcvttps2dq" in text and "vcvttss2si" not in text, "digits are made of whole vectors"
    found = set()
    for function, body in innermost_loops(text):
        names = Counter(line.replace("{vex}", "").split()[0] for line in body)
        if function == "byte_values":  # addresses may lie there, numbers not
            assert not any(STACK.search(line) and "mm" in line for line in body)
        elif names["vpdpbusd"]:
            found.add(names["vpdpbusd"])
            loads = {"vbroadcasti32x4", "vmovdqu64"} if wide else {"vbroadcasti128", "vpbroadcastd", "vmovdqu", "vmovdqa"}
            few = names["vpdpbusd"] <= 16
            left = wide and rows > 1 and few  # columns that are no whole line: an address may lie on the stack there
            others = {"addq", "leaq", "cmpq", "jl", "prefetcht0"} | ({"movq"} if left else set())
            assert set(names) <= {"vpdpbusd"} | loads | others, names
            assert not any(STACK.search(line) and (not left or "mm" in line) for line in body)
            assert few or names["prefetcht0"] in (2, 4), "between products, and never all at once"
    least = ({1: {8, 4}, 2: {8, 12}, 4: {16, 10}} if wide else {1: {8}, 2: {8, 12, 6}, 4: {8, 10}})[rows]
    assert found == least | ({4 * n for n in least} if wide and rows > 1 else set())


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_bfloat16_is_widened_by_zips_when_decoding(rows: int) -> None:
    """NEON shifts once a cycle, and zips twice."""
    arch, cpu, _, _ = TARGETS["neoverse-n1"]
    kernel = Kernel("decode", "bfloat16", Register(4, 4 if rows == 4 else 8, rows), "b", varlen=True, paged=True)
    text = compiler.assembly(kernel, compiler.Machine(arch + LINUX, cpu, ""))
    products = [body for name, body in innermost_loops(text) if name in ("block", "dots", "values")]
    long = [body for body in products if sum("fmla" in line for line in body) >= (8 if rows == 1 else 64)]
    assert len(long) >= 2
    for body in long:
        assert any("zip2" in line for line in body) and not any("shll" in line for line in body)


@pytest.mark.parametrize("target", ["neoverse-n1", "x86-64-v3", "skylake-avx512"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_compile_without_calls(target: str, dtype: str) -> None:
    """Conversions and FMAs must be instructions: a call into a library would cost a hundred times as much."""
    arch, cpu, isa, _ = TARGETS[target]
    tile = tile_of(isa)
    if dtype == "float64":
        tile = Register(tile.lanes // 2, tile.vectors, tile.keys)
    text = compiler.assembly(Kernel("forward", dtype, tile, "b"), compiler.Machine(arch + LINUX, cpu, ""))
    own = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    called = set(re.findall(r"^\s+(?:bl|callq?)\s+(\w+)", text, re.MULTILINE))
    assert called <= own | {"memset", "memcpy"}, called - own


@pytest.mark.parametrize("isa", ["neon", "avx2", "avx512"])
def test_few_rows_have_a_low_tile(isa: str) -> None:
    """No strip is more than half idle if a lower one would do, and none lacks accumulators for the FMAs in flight."""
    pipe, _ = core_figures(isa, "")
    usual = tile_of(isa)
    for rows in range(1, 2 * usual.rows):
        tile = tile_of(isa, rows=rows)
        assert tile == usual or (tile.rows < rows + tile.lanes and 2 * tile.rows <= usual.rows)
        assert tile.vectors * tile.keys >= pipe["fma_latency"] * pipe["fma_per_cycle"]
        assert tile == usual or tile.rows >= rows
        assert 2 * -(-rows // usual.lanes) > usual.vectors or tile != usual


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_kept_on_disk_needs_no_llvm_to_be_loaded(target: str) -> None:
    """On Linux every kernel and the team's entry become an image: loading LLVM takes a tenth of a second and 50 MiB."""
    arch, cpu, isa, _ = TARGETS[target]
    machine = compiler.Machine(arch + LINUX, cpu, "")
    assert image.link(compiler.build_text(team.ENTRY, machine), "team") is not None
    kernels = [
        Kernel("forward", "float32", tile_of(isa)),
        Kernel("forward", "float16", tile_of(isa, 128), structure="b", dropout=True),
        Kernel("backward", "bfloat16", tile_of(isa), structure="b", softcap=True),
        Kernel("decode", "float32", Register(tile_of(isa).lanes, 8, 1)),
        Kernel("decode", "bfloat16", Register(tile_of(isa).lanes, 4, 4)),
    ]
    double = tile_of(isa)._replace(lanes=tile_of(isa).lanes // 2)
    kernels += [Kernel("forward", "float16", double, double=True), Kernel("backward", "bfloat16", double, double=True)]
    kernels += [Kernel("decode", "float16", double._replace(vectors=4, keys=4), double=True)]
    if target in ("neoverse-n1", "sapphirerapids"):
        pages = Kernel("decode", "bfloat16", Register(tile_of(isa).lanes, 4, 4), "b", varlen=True, paged=True, stored="int8")
        kernels += [pages._replace(bytes=True), pages._replace(bytes=True, together=True, tile=pages.tile._replace(keys=1))]
    if target == "sapphirerapids":
        kernels += [Kernel(kind, "bfloat16", Register(16, 2, 32), structure="b", matrix="amx") for kind in PRODUCTS]
    for kernel in kernels:
        assert image.link(compiler.build(kernel, machine), "worker") is not None, kernel


def test_rows_that_see_few_keys_have_the_longer_polynomial() -> None:
    """Of single keys' errors only those of few keys reach the output."""
    tile = tile_of("avx512")
    text = compiler.assembly(Kernel("forward", "float32", tile), compiler.Machine("x86_64" + LINUX, "sapphirerapids", ""))
    steps = {name: sum("vfmadd" in line for line in body) for name, body in innermost_loops(text) if name.endswith("_step")}
    assert steps["few_keys_step"] == 2 * (steps["bounded_step"] + tile.vectors)  # of two keys
