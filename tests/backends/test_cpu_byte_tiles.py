"""Decoding over int8 pages on matrix tiles of bytes: the instructions of this processor where it has AMX-INT8, and everywhere
the same kernels with tiles that are loops over memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")


import tilewise as tw
from tests.backends.plain_bytes import pretend_vnni
from tests.backends.test_cpu_assembly import LINUX, STACK, innermost_loops
from tests.backends.test_cpu_bytes import LINE, XEON, asked_lines, attend, check_asked, lse_of, problem
from tests.backends.test_cpu_memory import forget
from tests.cache.caches import build, worst
from tilewise.backends.cpu import backend, blocks, image, matrix, plan
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu.spec import Kernel, Register
from tilewise.hardware.cache import CACHE_VARIABLE

HEADS = [(4, 2), (3, 1), (8, 2), (16, 2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=["this one", "tiles"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[str]:
    """Only where tiles of bytes are multiplied; every kernel of a test must do so."""
    if request.param == "tiles":
        pretend_vnni(monkeypatch, "avx512", directory, tiles=True)
    elif not plan.matrix_unit(problem(), "decode", backend.probe_cpu()):
        pytest.skip("this processor has no tiles of bytes")
    forget(monkeypatch)  # a call like one before would find its kernel ready
    kernels: list[Kernel] = []
    original = compiler.worker
    monkeypatch.setattr(compiler, "worker", lambda kernel: (kernels.append(kernel), original(kernel))[1])
    yield str(request.param)
    assert kernels and all(kernel.matrix and kernel.bytes for kernel in kernels)


def check(lengths: list[int], **sizes: Any) -> None:
    built = build([1] * len(lengths), lengths, stored=torch.int8, **sizes)
    out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu")
    assert worst(built, out, lse) <= 1.0, sizes


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_conformance(dtype: torch.dtype, heads: tuple[int, int], order: str) -> None:
    """Tiles of one page and of several, blocks that end anywhere, one page for all; no keys at all."""
    for dims in ((64, 64), (128, 128), (192, 16), (256, 32), (64, 80), (128, 192)):
        for page in (1, 7, 8, 16, 64, 256):
            check([5, 0, 150, 31], heads=heads, dims=dims, page=page, order=order, dtype=dtype)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 63, 64, 65, 79, 128, 130])
def test_conformance_of_lengths(length: int) -> None:
    for page in (16, 24, 512):
        for scaled in ("tensor", "head", "token"):
            check([length], heads=(8, 2), dims=(64, 64), page=page, scaled=scaled, dtype=torch.bfloat16)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("keys", [64, 128, 192])
def test_conformance_of_blocks_and_splits(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Blocks of two products, and of so many keys that values are multiplied as floats; a window that begins anywhere."""
    monkeypatch.setattr(blocks, "grain", lambda kernel: (1, keys))
    built = build([1] * 2, [700, 333], dtype=torch.bfloat16, stored=torch.int8, heads=(8, 2), dims=(128, 64))
    for options in ({}, {"splits": 3}):
        for mask in ({}, {"mask": tw.causal() & tw.window(171)}):
            given: dict[str, Any] = {**mask, **options}
            out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu", **given)
            assert worst(built, out, lse, **mask) <= 1.0


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("row", ["zeros", "tiny", "far apart", "far apart in one head"])
def test_conformance_of_other_rows(row: str, heads: tuple[int, int]) -> None:
    built = build([1] * 2, [40, 100], dtype=torch.bfloat16, stored=torch.int8, heads=heads, dims=(64, 64))
    if row in ("zeros", "tiny"):
        built.q *= {"zeros": 0.0, "tiny": 2.0**-80}[row]
    else:
        built.q[:, 0 if row.endswith("head") else slice(None), ::3] *= 2.0**-40
    out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu")
    assert worst(built, out, lse) <= 1.0


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("limbs", [3, 4])
@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize("dims", [64, 128, 256])
def test_scores_are_those_of_integers(dims: int, group: int, limbs: int) -> None:
    """Every byte a number of q can have meets every byte of keys; what is rounded is the score, and nothing before it. Scales
    hide all keys but one, wherever that is."""
    g, keys, least = torch.Generator().manual_seed(dims + limbs), 70, -14 if limbs == 3 else -22
    q = torch.randn(group, dims, generator=g).sign() * torch.randint(128, 256, (group, dims), generator=g) / 128
    q *= 2.0 ** torch.randint(least, 1, (group, dims), generator=g)
    q[:, 0], q[:, 1] = 1.0, 2.0**least
    k = torch.randint(-128, 128, (keys, 1, dims), generator=g)
    k[..., ::5], k[..., 1::5] = -128, 127
    exact = q.double() @ k[:, 0].double().T  # (group, keys)
    for key in (0, 1, 15, 16, 31, 38, 47, 48, 63, 64, 69):
        sign = exact[:, key].sign()
        scales = torch.zeros(1, keys, 1)
        scales[0, key] = 1.0
        lse = lse_of((q * sign[:, None]).bfloat16(), k, k_scale=scales, scale=1.0)
        # beside a score of more than 100 the others' zeros are nothing; roundings of the score, of log2(e), and of the LSE
        seen = exact[:, key].abs() > 100
        torch.testing.assert_close(lse[seen], exact[seen, key].abs().float(), rtol=8 * 2.0**-24, atol=4 * 2.0**-24)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dims", [16, 64, 80, 128])
@pytest.mark.parametrize("keys", [3, 16, 64, 70, 128])
def test_every_key_has_its_weight(keys: int, dims: int) -> None:
    """One key weighs 32 times as much as each other: keys and values must not be mixed up on their way into tiles."""
    g = torch.Generator().manual_seed(keys)
    q = torch.zeros(4, 64, dtype=torch.float16)
    q[:, 0] = 1.0
    v = torch.randint(-128, 128, (keys, 2, dims), generator=g)
    for heavy in range(0, keys, max(1, keys // 16)):
        k = torch.zeros(keys, 2, 64)
        k[heavy, :, 0] = 1
        weights = torch.ones(keys, dtype=torch.float64)
        weights[heavy] = 32
        want = torch.einsum("s,shd->hd", weights, v.double()).repeat_interleave(2, 0) / weights.sum()
        out = attend(q, k, v, k_scale=torch.log(torch.tensor(32.0)))
        assert ((out.double() - want).abs() <= 2.0**-11 * (want.abs() + 2.0**-10 * 128)).all(), heavy


def test_results_are_those_of_vectors(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Bit by bit, where scores are so short that floats have all their digits."""
    g = torch.Generator().manual_seed(3)
    pages, page, heads = 24, 16, 2
    k, v = (torch.randint(-128, 128, (pages, page, heads, n), dtype=torch.int8, generator=g) for n in (128, 80))
    table = torch.randperm(pages, generator=g).to(torch.int32)[None, :12]
    scales = {f"{name}_scale": (torch.rand(pages, page, heads, generator=g) + 0.5) * 2.0**-11 for name in "kv"}
    lengths = torch.tensor([180], dtype=torch.int32)
    found = {}
    original = compiler.worker
    for tiles in (False, True):
        kernels: list[Kernel] = []
        with monkeypatch.context() as patch:
            pretend_vnni(patch, "avx512", directory, tiles=tiles)
            patch.setattr(compiler, "worker", lambda kernel, seen=kernels: (seen.append(kernel), original(kernel))[1])
            patch.setattr(blocks, "grain", lambda kernel: (1, 64))
            cache = tw.KVCache.paged(k, v, table, lengths, **scales)
            for group in (2, 3, 4, 8):
                q = torch.randint(-8, 9, (1, 1, heads * group, 128), generator=torch.Generator().manual_seed(group)).bfloat16()
                found[tiles, group] = tw.attention_cached(q, cache, return_lse=True, scale=2.0**-3, backend="cpu")
        assert {bool(kernel.matrix) for kernel in kernels} == {tiles}
    for group in (2, 3, 4, 8):
        assert all(map(torch.equal, found[False, group], found[True, group]))


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("fall", [2, 7, 14, 25, 60])
def test_light_values_are_not_lost(fall: int) -> None:
    """One key outweighs the others by 2**fall, and its values are 0: what is left is theirs, with all digits of the dtype."""
    keys = 75
    q = torch.zeros(4, 64, dtype=torch.bfloat16)
    q[:, 0] = 1.0
    k, v = torch.zeros(keys, 2, 64), torch.full((keys, 2, 64), 127)
    k[5, :, 0], v[5] = 1, 0
    out = attend(q, k, v, k_scale=torch.log(torch.tensor(2.0)) * fall).float()
    light = (keys - 1) * 2.0**-fall
    rounding = 2.0**-8 + 2.0**-12  # of the output, and of a weight
    torch.testing.assert_close(out, torch.full_like(out, 127 * light / (1 + light)), rtol=rounding, atol=0)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_heads_only(bad: float) -> None:
    """In q, in the scales of K and in those of V; negative scales of V, tiny and huge ones are numbers like any other."""
    g = torch.Generator().manual_seed(1)
    q = torch.zeros(4, 64, dtype=torch.bfloat16)
    k, v = torch.randint(1, 100, (24, 2, 64), generator=g), torch.randint(1, 128, (24, 2, 64), generator=g)
    for size in (1.0, 2.0**-100, 2.0**100, 0.0):
        scales = torch.randn(1, 24, 2, generator=g) * size
        want = (v * scales[0, ..., None].double()).mean(0).repeat_interleave(2, 0)
        limit = 2.0**-8 * want.abs() + 2.0**-18 * 128 * size
        assert ((attend(q, k, v, v_scale=scales).double() - want).abs() <= limit).all(), size
    scales = torch.ones(1, 24, 2)
    scales[0, 3, 1] = bad
    for name in ("k_scale", "v_scale"):
        out = attend(q + 1, k, v, **{name: scales})
        assert out[:2].isfinite().all() and not out[2:].isfinite().all()
    q[1, 3] = bad
    out = attend(q, k, v)
    assert out[[0, 2, 3]].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("fall", [9, 17, 19])
def test_which_values_are_multiplied_as_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fall: int) -> None:
    """With products of tiles left out, nothing is left of a block, unless its weights are too far apart and it takes floats: four
    bytes of a weight reach further than three."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    for unit in matrix.UNITS.values():
        monkeypatch.setattr(unit, "dot_unsigned", lambda *args: None)
    q, k = torch.ones(4, 64, dtype=torch.float16), torch.zeros(12, 2, 64)
    k[3, :, 0] = 1
    out = attend(q, k, torch.ones(12, 2, 32), k_scale=torch.log(torch.tensor(2.0)) * fall)
    assert (out == (0 if fall < 18 else 1)).all()


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_every_line_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int, page: int) -> None:
    """Of K and V of all heads, but for the first block's K; lines of V once for each four rows."""
    pretend_vnni(monkeypatch, "avx512", tmp_path, tiles=True)
    k, v, counts = asked_lines(monkeypatch, rows, 1024, page)
    check_asked(k, counts, 1)
    check_asked(v, counts, max(1, rows // 4))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_scales_are_asked_for_a_block_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int) -> None:
    """But for those of the first block, of 64 keys."""
    pretend_vnni(monkeypatch, "avx512", tmp_path, tiles=True)
    scales = torch.ones(1024 // 16, 16, 4)
    *_, counts = asked_lines(monkeypatch, rows, 1024, 16, scales)
    lines = range(scales.data_ptr() // LINE, (scales.data_ptr() + scales.nbytes) // LINE)
    assert sum(counts[line] > 0 for line in lines) >= 0.93 * len(lines)


def test_who_multiplies_tiles_of_bytes() -> None:
    def kernel(spec: Any = XEON, **change: Any) -> str:
        return plan.tiles(problem(**change), spec)["decode"].kernel

    for change in ({}, {"heads": 16}, {"heads": 24}, {"dtype": "float16"}, {"head_dim": 64}, {"head_dim_v": 80}):
        assert kernel(**change) == "decode_block_amx", change
    assert kernel(heads=8) == "decode_stream", "memory is what it waits for"
    for change in ({"head_dim": 80}, {"dtype": "float32"}, {"head_dim_v": 40}):
        assert kernel(**change) == "decode_block", change
    assert kernel(heads=1024, kv_heads=1, head_dim=256, head_dim_v=512) == "decode_block_amx", "and a frame has room for it"
    flags = set(XEON.isa_flags)
    for missing in ("amx_int8", "amx_tile", "avx512_vnni"):
        assert kernel(replace(XEON, isa_flags=tuple(flags - {missing}))) == "decode_block"
    assert plan.tiles(replace(problem(), stored=""), XEON)["decode"].kernel == "decode_block"
    tile = plan.tiles(problem(), XEON)["decode"]
    assert tile.block_k == 64 and tile.registers == 8
    assert "int8 keys as they lie and values by fours, multiplied as bytes on tiles of the matrix unit" in "\n".join(tile.reasons)
    made = plan.kernel_for(problem(), tile, XEON)
    assert made.matrix == "amx" and made.bytes and made.together
    assert all(choice.block_k % 64 == 0 for choice in plan.choices(problem(), XEON, "decode"))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [2, 4])
def test_assembly(rows: int, together: bool) -> None:
    """Tiles are set up once and given back; every product has one load, and four share another; no vector is on the stack; V is
    turned by eight shuffles a line, and between products of tiles nothing is done on vectors."""
    tile = Register(16, 4 if rows == 4 else 8, rows)
    kernel = Kernel(
        "decode", "bfloat16", tile, "b", varlen=True, paged=True, stored="int8", together=together, bytes=True, matrix="amx"
    )
    machine = compiler.Machine("x86_64" + LINUX, "sapphirerapids", "")
    text = compiler.assembly(kernel, machine)
    for once in ("ldtilecfg", "tilerelease"):
        assert len(re.findall(rf"^\s+{once}\b", text, re.MULTILINE)) == 1
    phases = ("place_keys", "byte_dots", "softmax", "weights", "turn_values", "byte_values")
    bodies = {name: body for name, body in functions(text).items() if name in phases}
    assert len(bodies) == len(phases)
    counts = {name: Counter(line.split()[0] for line in body) for name, body in bodies.items()}
    # by strides and by rows, four tiles and one; whole lines of values and what is left of them
    assert counts["byte_dots"]["tdpbssd"] == 10 and counts["byte_dots"]["tileloadd"] == 14
    assert counts["byte_values"]["tdpbusd"] == 5 and counts["byte_values"]["tileloadd"] == 7
    for name, body in bodies.items():
        assert not any(STACK.search(line) and "mm" in line for line in body), f"{name} spills"
    for name, body in innermost_loops(text):
        found = Counter(line.split()[0] for line in body)
        if found["tdpbusd"]:
            assert not any(re.search(r"%[xyz]mm", line) or STACK.search(line) for line in body)
        elif name == "turn_values" and any("zmm" in line for line in body):
            assert sum(n for key, n in found.items() if key.startswith("vpunpck")) == 8
            assert not any(STACK.search(line) for line in body)
    own = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert set(re.findall(r"^\s+callq?\s+(\w+)", text, re.MULTILINE)) <= own | {"memset", "memcpy"}
    assert image.link(compiler.build(kernel, machine), "worker") is not None


def functions(text: str) -> dict[str, list[str]]:
    """The instructions of every function."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if label := re.match(r"(\w+):", line):
            name = label[1]
        elif re.match(r"\s+[a-z{]", line):
            found.setdefault(name, []).append(line)
    return found
