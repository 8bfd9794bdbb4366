"""The assembly of `quick_softmax_step`, played instruction by instruction for one warp, against the formula."""

from __future__ import annotations

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
        "add.f32": np.add, "add.rn.f32": np.add, "mul.rn.f32": np.multiply, "max.f32": np.fmax, "setp.gt.f32": np.greater, "setp.eq.f32": np.equal,
        "setp.geu.f32": lambda x, y: ~(x < y),
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


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("kind", ["near", "rising", "overflow", "unseen", "late", "nan"])
@pytest.mark.parametrize("ahead", [0, 2, 8])
@pytest.mark.parametrize(("n", "pieces"), [(32, 1), (32, 4), (32, 5), (32, 8), (16, 3)])
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
    even, odd, told = (x.value for x in weighed(Value(s_tile[..., 0]), Value(s_tile[..., 1]), Value(m), scale, pieces))
    lane = torch.arange(LANES)
    for warp in range(4):
        rows = [16 * warp + lane // 4 + 8 * row for row in range(2)]

        def of(x: torch.Tensor, i: int, rows: list[torch.Tensor] = rows) -> np.ndarray:
            return x[rows[i % 2], i // 2, lane % 4].numpy().astype(F32)

        given = {f"${3 * n + i}": of(s_tile[..., 0], i) for i in range(n)} | {
            f"${4 * n + i}": of(s_tile[..., 1], i) for i in range(n)
        }
        given |= {f"${5 * n + row}": m[rows[row], 0, 0].numpy() for row in range(2)} | {f"${6 * n}": np.full(LANES, F32(scale))}
        found = play(_weighing.fn(n, pieces, ahead), given)
        wanted = {f"${i}": of(even, i) for i in range(n)} | {f"${n + i}": of(odd, i) for i in range(n)}
        wanted |= {f"${2 * n + i}": of(told, i) for i in range(6)}
        for name, want in wanted.items():
            np.testing.assert_allclose(found[name], want, rtol=2e-5, atol=1e-30, err_msg=f"{name} of warp {warp}")
