"""The assembly of `quick_softmax_step`, played instruction by instruction for one warp, against the formula."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.gluon_values import Value
from tests.backends.test_hopper_forward_logic import weighed
from tilewise.backends.hopper.quick_softmax import _weighing

pytest.importorskip("triton")
LANES = 32
LANE = torch.arange(LANES)
F32 = np.float32


def number(text: str) -> Any:
    return np.array(int(text[2:], 16), dtype=np.uint32).view(F32)


def play(text: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers after the text: float32 or bool for each lane of a warp. A branch is taken by all or none."""
    registers: dict[str, Any] = dict(given)
    lines = [line.strip() for line in re.split(r";|(?<=:)\s", text.strip("{} ")) if line.strip()]
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.endswith(":")}

    def read(name: str) -> Any:
        if name.startswith("0f"):
            return np.full(LANES, number(name))
        return registers[name]

    two: dict[str, Callable[[Any, Any], Any]] = {
        "add.f32": np.add, "add.rn.f32": np.add, "mul.rn.f32": np.multiply, "max.f32": np.fmax,
        "setp.eq.f32": np.equal, "setp.gt.f32": np.greater, "setp.geu.f32": lambda x, y: ~(x < y),
    }  # fmt: skip
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.endswith(":") or line.startswith(".reg"):
            continue
        if line.startswith("@!any bra.uni"):
            assert registers["any"].all() or not registers["any"].any()
            at = at if registers["any"][0] else labels[line.split()[-1]]
            continue
        name, _, rest = line.partition(" ")
        into, *args = [word.strip() for word in rest.split(",")]
        if name == "shfl.sync.bfly.b32":
            registers[into] = read(args[0])[np.arange(LANES) ^ int(args[1])]
        elif name == "vote.sync.any.pred":
            registers[into] = np.full(LANES, read(args[0]).any())
        elif name == "selp.f32":
            registers[into] = np.where(read(args[2]), read(args[0]), read(args[1]))
        elif name == "setp.geu.or.f32":
            registers[into] = ~(read(args[0]) < read(args[1])) | read(args[2])
        elif name == "fma.rn.f32":
            x, y, z = (read(one).astype(np.float64) for one in args)
            registers[into] = (x * y + z).astype(F32)
        elif name in ("mov.f32", "neg.f32", "ex2.approx.ftz.f32"):
            x = read(args[0])
            registers[into] = {"m": x, "n": -x, "e": np.exp2(x.astype(np.float64)).astype(F32)}[name[0]]
        else:
            registers[into] = two[name](read(args[0]), read(args[1]))
    return registers


def played(
    n: int, pieces: int, ahead: int, warp: int, s_tile: torch.Tensor, m: torch.Tensor, scale: float
) -> dict[str, np.ndarray]:
    """A warp's registers, of scores [64, groups, lanes, 2] and m [64, 1, 1]."""
    rows = [16 * warp + LANE // 4 + 8 * row for row in range(2)]
    given = {
        f"${(3 + half) * n + i}": s_tile[rows[i % 2], i // 2, LANE % 4, half].numpy() for half in range(2) for i in range(n)
    }
    given |= {f"${5 * n + row}": m[rows[row], 0, 0].numpy() for row in range(2)} | {f"${6 * n}": np.full(LANES, F32(scale))}
    return play(_weighing.fn(n, pieces, ahead), given)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("kind", ["near", "rising", "overflow", "unseen", "late", "nan", "inf", "all nan"])
@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize(("n", "pieces"), [(32, 1), (32, 5), (32, 8), (16, 3)])
def test_the_assembly_is_the_formula(n: int, pieces: int, ahead: int, kind: str) -> None:
    torch.manual_seed(n + pieces)
    groups, scale = n // 2, 0.125
    s_tile = 20 * torch.randn(64, groups, 4, 2)
    m = torch.full((64, 1, 1), 5.0)
    if kind in ("rising", "overflow"):
        s_tile += (torch.arange(groups) * (20 if kind == "rising" else 2000)).float()[:, None, None]
    if kind in ("unseen", "late"):
        m[5:30] = -torch.inf
        s_tile[5:30] = -torch.inf
    if kind == "late":
        s_tile[5:20, -1, 2, 1] = -4000.0
    if kind == "nan":
        s_tile[40, 3, 1, 0] = torch.nan
    if kind == "inf":
        s_tile[40, 3, 1, 0], s_tile[3, 6, 0, 1] = torch.inf, -torch.inf
    if kind == "all nan":
        s_tile[40], m[40] = torch.nan, -torch.inf
    even, odd, told = (x.value for x in weighed(Value(s_tile[..., 0]), Value(s_tile[..., 1]), Value(m), scale, pieces))
    for warp in range(4):
        found = played(n, pieces, ahead, warp, s_tile, m, scale)
        rows = [16 * warp + LANE // 4 + 8 * row for row in range(2)]
        wanted = {f"${half * n + i}": x[rows[i % 2], i // 2, LANE % 4] for half, x in enumerate((even, odd)) for i in range(n)}
        wanted |= {f"${2 * n + i}": told[rows[i % 2], i // 2, LANE % 4] for i in range(6)}
        for name, want in wanted.items():
            np.testing.assert_allclose(found[name], want.numpy(), rtol=2e-5, atol=1e-30, err_msg=f"{name} of warp {warp}")


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("theirs", [0.0, 400.0, torch.inf, torch.nan])
@pytest.mark.parametrize("ours", [0.0, 3.0, 90.0])
def test_a_row_does_not_depend_on_others(ours: float, theirs: float) -> None:
    """They share a warp's branch, but no bit: a query's result is the same whatever comes after it."""
    n, groups = 32, 16
    torch.manual_seed(5)
    s_tile, m = 20 * torch.randn(64, groups, 4, 2), torch.full((64, 1, 1), 5.0)
    s_tile[7] += ours * torch.arange(groups)[:, None, None]
    before = played(n, 8, 4, 0, s_tile, m, 0.125)
    s_tile[8:] += theirs
    s_tile[:7, 3, 1] += theirs
    after = played(n, 8, 4, 0, s_tile, m, 0.125)
    mine = [f"${i}" for i in range(2 * n + 6) if i & 1 == 0]  # of the first of two rows
    assert all(np.array_equal(before[name][28:], after[name][28:]) for name in mine)
    assert np.isfinite(before["$0"][28:]).all()


@pytest.mark.parametrize("pieces", [1, 4, 8])
def test_sums_are_those_of_lane_sum_to_the_bit(pieces: int) -> None:
    """Where statistics are asked for, steps take maxima and add up by `lane_sum`: the output is the same."""
    n = 32
    torch.manual_seed(6)
    s_tile, m = 10 * torch.randn(64, n // 2, 4, 2), torch.full((64, 1, 1), 5.0)
    found = played(n, pieces, 2, 0, s_tile, m, 0.125)
    for row in range(2):
        pairs = [found[f"${i}"] + found[f"${n + i}"] for i in range(row, n, 2)]
        fours = [x + y for x, y in zip(pairs[::2], pairs[1::2], strict=True)]
        assert np.array_equal(found[f"${2 * n + row}"], functools.reduce(np.add, fours))
