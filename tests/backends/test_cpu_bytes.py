"""Decoding over int8 pages: scores by products of bytes, which are exact, and by floats where q does not allow it.

The kernels of this processor, and those of x86 with instructions that any processor has in place of VPDPBUSD.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from llvmlite import ir

import tilewise as tw
from tests.backends.plain_bytes import FLAGS, pretend_vnni
from tests.backends.test_cpu_memory import forget
from tests.cache.caches import build, worst
from tilewise.backends.cpu import backend, decode_weights, plan
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode_bytes import BITS, LIMBS
from tilewise.backends.cpu.decode_stream import StreamDecode
from tilewise.backends.cpu.ir import Pointer
from tilewise.backends.cpu.spec import MOST_BYTE_COLUMNS, Kernel, Register
from tilewise.hardware import lookup
from tilewise.hardware.cache import CACHE_VARIABLE
from tilewise.problem import Problem

N1, XEON = lookup("altra-q80"), lookup("xeon-8480")
HEADS = [(2, 2), (4, 2), (8, 2), (6, 2), (1, 1), (8, 1)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=["this one", *FLAGS])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, directory: Path) -> str:
    if request.param != "this one":
        pretend_vnni(monkeypatch, request.param, directory)
    return str(request.param)


@pytest.fixture
def multiplies(processor: str) -> None:
    """Only where bytes are multiplied."""
    if not plan.multiplies_bytes(problem(), "decode", backend.probe_cpu()):
        pytest.skip("this processor has no products of bytes")


def cache_of(k: Tensor, v: Tensor, **scales: Tensor) -> tw.KVCache:
    """One sequence in one page of int8; scales are 1 if not given."""
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(k)], dtype=torch.int32)
    scales = {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0), **scales}
    return tw.KVCache.paged(k[None].to(torch.int8), v[None].to(torch.int8), table, lengths, **scales)


def lse_of(q: Tensor, k: Tensor, k_scale: Tensor | None = None, **options: Any) -> Tensor:
    """(Hq,) of one query, (Hq, D), over keys (S, Hk, D)."""
    cache = cache_of(k, k, **({} if k_scale is None else {"k_scale": k_scale}))
    _, lse = tw.attention_cached(q[None, None], cache, return_lse=True, backend="cpu", **options)
    return lse[0, :, 0]


def spread(dtype: torch.dtype) -> int:
    """Powers of two between the largest number of a row and the smallest that is a whole number of units."""
    digits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    return BITS - digits


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_conformance(dtype: torch.dtype, heads: tuple[int, int], order: str) -> None:
    turn = HEADS.index(heads) + (order == "hnd")  # every page with every head dim, over all heads
    for number, dims in enumerate(((16, 16), (64, 32), (128, 128), (256, 64), (40, 40))):
        sizes = {"heads": heads, "dims": dims, "page": (3, 16, 64)[(turn + number) % 3], "order": order}
        built = build([1] * 3, [5, 150, 31], dtype=dtype, stored=torch.int8, **sizes)
        out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu")
        assert worst(built, out, lse) <= 1.0, sizes


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("row", ["zeros", "one number", "tiny", "huge", "far apart", "far apart in one head"])
def test_conformance_of_other_rows(row: str, heads: tuple[int, int]) -> None:
    """Rows of few or very unlike numbers: those that are no whole numbers of units are multiplied as floats."""
    built = build([1] * 2, [40, 7], dtype=torch.bfloat16, stored=torch.int8, heads=heads, dims=(64, 64))
    q = built.q
    if row == "zeros":
        q.zero_()
    elif row == "one number":
        q[..., 1:] = 0
    elif row in ("tiny", "huge"):
        q *= {"tiny": 2.0**-80, "huge": 2.0**30}[row]
    else:
        q[:, 0 if row.endswith("head") else slice(None), ::3] *= 2.0**-40
    options = {"scale": 2.0**-36} if row == "huge" else {}
    out, lse = tw.attention_cached(q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu", **options)
    assert worst(built, out, lse, **options) <= 1.0


@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_what_cancels_leaves_nothing_behind(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Large products that add up to zero do not hide a small one: sums of floats, each number times a scale that is no power of
    two, would lose digits of it."""
    hq, hk = heads
    q = torch.zeros(hq, 64, dtype=dtype)
    large = 2.0 ** min(15, spread(dtype))  # what float16 has room for
    for h in range(hq):
        q[h, [7, 20 + h, 61]] = torch.tensor([large, 1.0, -large], dtype=dtype)
    k = torch.full((1, hk, 64), 127)
    k[..., 20:40] = 1
    for scale in (0.7, 0.123456):
        torch.testing.assert_close(lse_of(q, k, scale=scale), torch.full((hq,), scale), rtol=2e-7, atol=0)


@pytest.mark.usefixtures("multiplies")
def test_the_smallest_unit_counts() -> None:
    """A number 2**22 times smaller than another in bfloat16 (2**19 in float16) has all its digits in the products."""
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        small = 2.0 - 2.0 ** (1 - digits)  # all of them are 1
        q = torch.zeros(1, 32, dtype=dtype)
        q[0, :2] = torch.tensor([2.0 ** min(spread(dtype), 15), small], dtype=dtype)
        k = torch.zeros(1, 1, 32)
        k[0, 0, 1] = 1
        torch.testing.assert_close(lse_of(q, k, scale=1.0), torch.tensor([small]), rtol=0, atol=0)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("finer", [30, 22])
def test_small_numbers_are_not_lost(heads: tuple[int, int], finer: int) -> None:
    """The key is 0 where q is large: what is left of the score is far below the row's unit, or in the lowest limb, in one head of
    all; nothing is left of the others."""
    hq, hk = heads
    q = torch.zeros(hq, 32, dtype=torch.bfloat16)
    q[:, 3] = 1.0
    q[-1, 9] = 1.5 * 2.0**-finer
    k = torch.zeros(1, hk, 32)
    k[..., 9] = 1
    expected = torch.zeros(hq)
    expected[-1] = 1.5
    torch.testing.assert_close(lse_of(q, k, scale=2.0**finer), expected, rtol=2e-7, atol=0)


@pytest.mark.usefixtures("processor")
def test_the_largest_sums_have_room() -> None:
    """All products as large as they can be, of one sign."""
    for dtype in (torch.bfloat16, torch.float16):
        largest = 1.9921875 if dtype == torch.bfloat16 else 1.9990234375
        for sign in (1, -1):
            q = torch.full((4, MOST_BYTE_COLUMNS), sign * largest, dtype=dtype)
            k = torch.full((3, 2, MOST_BYTE_COLUMNS), -128)
            expected = -128.0 * sign * largest * MOST_BYTE_COLUMNS * 2.0**-15 + torch.tensor(3.0).log()
            torch.testing.assert_close(lse_of(q, k, scale=2.0**-15), expected.expand(4), rtol=1e-6, atol=0)
    joined = 128 * 257 * 128 * MOST_BYTE_COLUMNS
    assert joined < 2**31, "two limbs of every column, times -128, in a sum of 32 bits"
    assert 2 ** (BITS - 8 * (LIMBS - 1)) + 1 < 128, "the uppermost byte, with a carry"
    assert 255 * 128 * MOST_BYTE_COLUMNS < 2**23, "an unsigned limb of every column, times -128, in a float"
    assert 2 ** (BITS - 16) * 128 * MOST_BYTE_COLUMNS < 2**30, "the two upper limbs, signed"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_row_only(bad: float) -> None:
    q = torch.ones(4, 32, dtype=torch.bfloat16)
    q[1, 3] = bad
    k = torch.randint(1, 100, (9, 2, 32))
    lse = lse_of(q, k)
    assert not lse[1].isfinite() and lse[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("limbs", [3, 4])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [16, 48, 128, MOST_BYTE_COLUMNS])
@pytest.mark.usefixtures("multiplies")
def test_scores_are_those_of_integers(monkeypatch: pytest.MonkeyPatch, dims: int, heads: tuple[int, int], limbs: int) -> None:
    """Every byte a number of q can have meets every byte of keys; what is rounded is the score, and nothing before it."""
    forget(monkeypatch)  # a call like one before would find its kernel ready
    kernels: list[Kernel] = []
    original = compiler.worker
    monkeypatch.setattr(compiler, "worker", lambda kernel: (kernels.append(kernel), original(kernel))[1])
    g = torch.Generator().manual_seed(dims + limbs)
    (hq, hk), least = heads, -14 if limbs == 3 else -22
    q = torch.randn(hq, dims, generator=g).sign() * torch.randint(128, 256, (hq, dims), generator=g) / 128
    q *= 2.0 ** torch.randint(least, 1, (hq, dims), generator=g)
    q[:, 0], q[:, 1] = 1.0, 2.0**least
    q[1:2, 1:] *= q[1:2, 1:].abs() >= 2.0**-14  # three limbs, beside rows of four
    k = torch.randint(-128, 128, (1, hk, dims), generator=g)
    k[..., ::5], k[..., 1::5] = -128, 127
    exact = (q.double() * k[0].double()).sum(1)
    # roundings of the score, of log2(e), and of what the LSE is made of
    torch.testing.assert_close(lse_of(q.bfloat16(), k, scale=1.0), exact.float(), rtol=8 * 2.0**-24, atol=4 * 2.0**-24)
    assert all(kernel.bytes for kernel in kernels) and kernels


def attend(q: Tensor, k: Tensor, v: Tensor, **scales: Tensor) -> Tensor:
    """(Hq, Dv) of one query, (Hq, D), over keys and values of one page, (S, Hk, …)."""
    return tw.attention_cached(q[None, None], cache_of(k, v, **scales), scale=1.0, backend="cpu")[0, 0]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("keys", [3, 4, 16, 21, 32, 70])
@pytest.mark.parametrize("dims", [16, 48, 64, 80, 128])
def test_equal_weights_give_the_mean(keys: int, dims: int) -> None:
    """Every byte a value can have, blocks that end anywhere."""
    v = torch.randint(-128, 128, (keys, 2, dims), generator=torch.Generator().manual_seed(keys))
    for heads in (4, 8):
        out = attend(torch.zeros(heads, 16, dtype=torch.float16), torch.ones(keys, 2, 16), v)
        mean = v.double().mean(0).repeat_interleave(heads // 2, 0)
        assert ((out.double() - mean).abs() <= 2.0**-11 * (mean.abs() + 2.0**-11 * 128)).all()


def test_sums_of_weights_have_room() -> None:
    limbs, keys = decode_weights.LIMBS, decode_weights.MOST_KEYS
    assert 255 * 257 * 128 * keys < 2**31, "two limbs, unsigned, of every key, times -128"
    assert 255 * 128 * keys < 2**24, "the uppermost limb in a float"
    largest = (2 - 2.0**-6) * 2 ** (decode_weights.weight_bits(limbs) - 1)
    assert largest + 1 < 127 * sum(256**limb for limb in range(limbs)), "signed digits reach so far"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("fall", [2, 7, 14, 25, 60])
def test_light_values_are_not_lost(fall: int) -> None:
    """One key outweighs the others by 2**fall, and its values are 0: what is left is theirs, with all digits of the dtype."""
    keys, dims = 20, 32
    q = torch.zeros(4, 16, dtype=torch.bfloat16)
    q[:, 0] = 1.0
    k, v = torch.zeros(keys, 2, 16), torch.full((keys, 2, dims), 127)
    k[5, :, 0], v[5] = 1, 0
    scale = torch.log(torch.tensor(2.0)) * fall
    out = attend(q, k, v, k_scale=scale)
    light = (keys - 1) * 2.0**-fall
    rounding = 2.0**-8 + 2.0**-12  # of the output, and of a weight
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), 127 * light / (1 + light)), rtol=rounding, atol=0)


@pytest.mark.usefixtures("processor")
def test_scales_of_values_may_be_any_number() -> None:
    """Negative ones, tiny and huge ones, 0; what is no number reaches the heads that see it, and no other."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.zeros(4, 16, dtype=torch.bfloat16), torch.ones(24, 2, 16)
    v = torch.randint(-128, 128, (24, 2, 32), generator=g)
    for size in (1.0, 2.0**-100, 2.0**100, 0.0):
        scales = torch.randn(1, 24, 2, generator=g) * size
        want = (v * scales[0, ..., None].double()).mean(0).repeat_interleave(2, 0)
        limit = 2.0**-8 * want.abs() + 2.0**-18 * 128 * size
        assert ((attend(q, k, v, v_scale=scales).double() - want).abs() <= limit).all(), size
    scales = torch.ones(1, 24, 2)
    scales[0, 3, 1] = float("nan")
    out = attend(q, k, v, v_scale=scales)
    assert out[:2].isfinite().all() and out[2:].isnan().all()


@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("fall", [9, 15])
def test_which_values_are_multiplied_as_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fall: int) -> None:
    """With products of bytes left out, nothing is left of a block, unless its weights are too far apart and it takes floats."""
    forget(monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(decode_weights.ByteValues, "columns", lambda *args: None)
    q, k = torch.ones(4, 16, dtype=torch.float16), torch.zeros(12, 2, 16)
    k[3, :, 0] = 1
    out = attend(q, k, torch.ones(12, 2, 32), k_scale=torch.log(torch.tensor(2.0)) * fall)
    assert (out == (0 if fall < decode_weights.weight_bits(decode_weights.LIMBS) - decode_weights.LEFT else 1)).all()


LINE = 64


def asked_lines(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, page: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Counter[int]]:
    """Pages of keys and values that were decoded for so many query heads a key head, and how often each line was prefetched."""
    forget(monkeypatch)
    asked: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(asked.append)
    where = ctypes.cast(note, ctypes.c_void_p).value

    def prefetch(e: Emit, address: Pointer, level: int = 1) -> None:
        e.ir.call(e.ir.inttoptr(e.raw(where), ir.FunctionType(ir.VoidType(), [ir.PointerType()]).as_pointer()), [address.raw])

    monkeypatch.setattr(Emit, "prefetch", prefetch)
    heads, dim, g = 4, 128, torch.Generator().manual_seed(rows)
    k, v = (torch.randint(-9, 9, (tokens // page, page, heads, dim), dtype=torch.int8, generator=g) for _ in range(2))
    table = torch.randperm(tokens // page, generator=g).to(torch.int32)[None]
    unit = torch.tensor(1.0) if scales is None else scales
    cache = tw.KVCache.paged(k, v, table, torch.tensor([tokens], dtype=torch.int32), k_scale=unit, v_scale=unit)
    tw.attention_cached((torch.randn(1, 1, heads * rows, dim, generator=g) / 16).bfloat16(), cache, backend="cpu", splits=1)
    return k, v, Counter(address // LINE for address in asked)


def check_asked(x: Tensor, counts: Counter[int], most: int) -> None:
    found = [counts[at] for at in range(x.data_ptr() // LINE, (x.data_ptr() + x.numel()) // LINE)]
    assert sum(n > 0 for n in found) >= 0.93 * len(found), "some are never asked for"
    assert sum(found) <= most * len(found), "some are asked for too often"


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("isa", FLAGS)
def test_every_line_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isa: str, rows: int) -> None:
    """Of K and V of all heads, but for the first block's K, and where a block whose rows lie a stride apart meets another: once
    for each four rows. Short vectors ask for a line twice, of which they use a half."""
    pretend_vnni(monkeypatch, isa, tmp_path)
    k, v, counts = asked_lines(monkeypatch, rows, 576, 16)
    most = max(1, rows // 4) * (1 if isa == "avx512" else 2)
    for x in (k, v):
        check_asked(x, counts, most)


@pytest.mark.parametrize("isa", FLAGS)
def test_rows_are_asked_for_two_steps_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isa: str) -> None:
    """The first that one head a key head asks for is the row behind two steps of four keys, in the first head."""
    pretend_vnni(monkeypatch, isa, tmp_path)
    k, _, counts = asked_lines(monkeypatch, 1, 576, 16)
    first = next(at for line in counts if 0 <= (at := line * LINE - k.data_ptr()) < k.numel())
    _, page, heads, dim = k.shape
    token, head = divmod(first // dim, heads)
    assert (token % page, head) == (8, 0)


def problem(**change: Any) -> Problem:
    usual: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "seqlen": 1, "kv_seqlen": 4096, "dtype": "bfloat16"}
    return replace(Problem.of(**(usual | change)), stored="int8", page=16, interleaved=True)


def test_who_multiplies_bytes() -> None:
    assert plan.multiplies_bytes(problem(), "decode", N1)
    assert plan.multiplies_bytes(problem(dtype="float16"), "decode", N1)
    assert not plan.multiplies_bytes(problem(dtype="float32"), "decode", N1), "24 digits are too many"
    assert not plan.multiplies_bytes(problem(head_dim=40), "decode", N1)
    assert not plan.multiplies_bytes(problem(head_dim=512), "decode", N1)
    assert not plan.multiplies_bytes(problem(), "forward", N1)
    assert not plan.multiplies_bytes(problem(), "decode", replace(N1, isa_flags=()))
    assert plan.multiplies_bytes(problem(), "decode", XEON)
    assert plan.multiplies_bytes(problem(), "decode", replace(XEON, isa="avx2", isa_flags=("avx_vnni",)))
    assert not plan.multiplies_bytes(problem(), "decode", replace(XEON, isa_flags=("asimddp", "avx512f")))
    assert not plan.multiplies_bytes(problem(), "decode", replace(XEON, isa="avx2"))
    assert not plan.multiplies_bytes(replace(problem(), stored="float8_e4m3fn"), "decode", N1)
    said = "\n".join(plan.tiles(problem(), N1)["decode"].reasons)
    assert "int8 keys and values are multiplied as bytes" in said
    said = "\n".join(plan.tiles(problem(head_dim_v=40), N1)["decode"].reasons)
    assert "int8 keys are multiplied as bytes" in said, "as the kernel does where values have no whole sixteens"


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, 16), ({"dtype": "float32"}, 8), ({"stored": "int8"}, 32), ({"heads": 16}, 8), ({"heads": 16, "stored": "int8"}, 32),
        ({"heads": 16, "dtype": "float32"}, 8), ({"heads": 8}, 64), ({"interleaved": False}, 16),
        ({"interleaved": False, "dtype": "float32"}, 16), ({"heads": 8, "kv_heads": 2}, 16),
    ],
)  # fmt: skip
def test_blocks_of_heads_decoded_together_leave_room_in_l1(change: dict[str, Any], keys: int) -> None:
    fields = {"stored": "", "interleaved": True} | {name: change[name] for name in ("stored", "interleaved") if name in change}
    sizes = {name: x for name, x in change.items() if name not in fields}
    tile = plan.tiles(replace(problem(**sizes), **fields), N1)["decode"]
    assert tile.block_k == keys and tile.groups > 1


@pytest.mark.parametrize(("heads", "keys"), [(16, 48), (32, 64), (64, 64)])
def test_avx512_has_longer_blocks_of_bytes(heads: int, keys: int) -> None:
    """As many as fill their share of L1, up to 64."""
    wide = replace(XEON, sram_bytes=32 << 10, isa_flags=("avx512f", "avx512_vnni"))
    for order in (True, False):
        bytes_, halves = (replace(problem(heads=heads), stored=x, interleaved=order) for x in ("int8", ""))
        tile = plan.tiles(bytes_, wide)["decode"]
        assert (tile.block_k, tile.groups) == (keys, 8)
        assert plan.tiles(halves, wide)["decode"].block_k == 16
        assert plan.tiles(bytes_, replace(wide, isa="avx2", isa_flags=("avx_vnni",)))["decode"].block_k == 16


@pytest.mark.parametrize(("stored", "dtype", "keys"), [("int8", "bfloat16", 8), ("", "bfloat16", 8), ("", "float32", 4)])
def test_avx512_asks_further_ahead_for_short_numbers(stored: str, dtype: str, keys: int) -> None:
    kernel = Kernel("decode", dtype, Register(16, 8, 1), "b", varlen=True, paged=True, stored=stored, together=True)
    assert StreamDecode(kernel, "x86_64").ahead == keys
