"""What the README says of speed in ten lines, and the model's predictions beside the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tools.site.records import hopper_cells, load, mean, plain, ratios, shown

Words = Callable[[str, str], str]


def _span(values: list[float], digits: int) -> str:
    low, high = shown(min(values), digits), shown(max(values), digits)
    return low if low == high else f"{low}–{high}"


def rows(say: Words) -> list[list[str]]:
    gpu, parts = load("gpu-2026-11-15"), load("gpu-parts-2026-11-15")
    n1, xeon, sixteen = (load(f"{name}-2026-11-15") for name in ("cpu", "cpu-avx512", "cpu-avx512-16"))
    grids = [[cell.ratio for cell in plain(hopper_cells(load(f"hopper-{side}-h200")))] for side in ("forward", "backward")]
    better = say("the better of FlashAttention-4 and cuDNN", "FlashAttention-4 与 cuDNN 中较快者")
    average = say("mean", "平均")
    comma, left, right = say(", ", "，"), say(" (", "（"), say(")", "）")

    def both(digits: int, *groups: list[float]) -> str:
        return f"{average} " + " / ".join(f"{mean(one):.{digits}f}{left}{_span(one, digits)}{right}" for one in groups)

    def spans(digits: int, *groups: list[float]) -> str:
        return " / ".join(_span(one, digits) for one in groups)

    def xeons(pattern: str, dtype: str) -> str:
        return spans(1, *(ratios(record, pattern, dtype) for record in (xeon, sixteen)))

    windows = [row["ratio"] for row in parts["records"] if row["case"].startswith("window")]
    grid = [f"{_span(one, 2)}{comma}{average} {mean(one):.2f}" for one in grids]
    few = [ratios(n1, pattern, "float32") for pattern in ("decode$", "window", "tiny")]
    return [
        [
            say(
                f"H200 forward, bf16, d 64–256, 512–16k tokens, full and causal ({len(grids[0])} cells)",
                f"H200 前向，bf16，d 64–256，512–16k 个 token，无掩码与因果（{len(grids[0])} 格）",
            ),
            better,
            grid[0],
        ],
        [say("H200 backward, the same cells", "H200 反向，同样的格"), better, grid[1]],
        [
            say("H200, portable Triton kernels, bf16 forward / backward", "H200，可移植的 Triton 内核，bf16 前向 / 反向"),
            say("SDPA's FlashAttention-2", "SDPA 的 FlashAttention-2"),
            both(2, ratios(gpu, "forward"), ratios(gpu, "backward")),
        ],
        [
            say("H200, fp32 at fp32's accuracy, forward / backward", "H200，fp32（保持 fp32 精度），前向 / 反向"),
            say("SDPA, memory-efficient", "SDPA 的 memory-efficient"),
            both(1, ratios(gpu, "float32 forward"), ratios(gpu, "float32 backward")),
        ],
        [
            say("H200, window(1024) of 16k tokens", "H200，16k 个 token 的 window(1024)"),
            say("the same kernel unmasked", "同一内核，无掩码"),
            _span(windows, 1),
        ],
        [
            say(
                "Arm Neoverse N1, 2 threads, fp32: full / causal / training",
                "Arm Neoverse N1，2 线程，fp32：无掩码 / 因果 / 训练",
            ),
            "SDPA",
            spans(2, *(ratios(n1, pattern, "float32") for pattern in ("full", "causal", "training"))),
        ],
        [
            say(
                "the same: decoding / window(256) of 8k tokens / a tiny call",
                "同上：解码 / 8k 个 token 的 window(256) / 极小的调用",
            ),
            "SDPA",
            f"{few[0][0]:.1f} / {few[1][0]:.0f} / {few[2][0]:.1f}",
        ],
        [
            say("Xeon with AVX-512, fp32, 2 / 16 threads: full", "带 AVX-512 的 Xeon，fp32，2 / 16 线程：无掩码"),
            "SDPA",
            xeons("full", "float32"),
        ],
        [
            say("the same with AMX, bf16, 2 / 16 threads: forward", "同上，使用 AMX，bf16，2 / 16 线程：前向"),
            "SDPA",
            xeons("(?!training|decode|tiny)", "bfloat16"),
        ],
        [say("the same, training", "同上，训练"), "SDPA", xeons("training", "bfloat16")],
    ]


def predictions() -> dict[tuple[str, int, str, int], tuple[float, float]]:
    """By pass, head dim, mask and length: useful TFLOP/s that the model predicts for the Hopper kernels, and the record's."""
    from tilewise.backends import plans
    from tilewise.hardware import lookup
    from tilewise.masks import causal, full
    from tilewise.model import work
    from tilewise.model.evaluation import call_seconds
    from tilewise.problem import Problem

    spec, found = lookup("h200"), {}
    for side in ("forward", "backward"):
        for cell in plain(hopper_cells(load(f"hopper-{side}-h200"))):
            d, tokens, mask = cell.head_dim, cell.tokens, causal() if cell.mask == "causal" else full()
            batch, heads = 16384 // tokens, 2048 // d
            problem = Problem.of(batch=batch, heads=heads, seqlen=tokens, head_dim=d, device="cuda", mask=mask)
            tiles = plans.tiles("hopper", problem, spec)
            mine = [tile for name, tile in tiles.items() if name.startswith("backward") == (side == "backward")]
            flops = work(problem, tiles["forward"]).useful * (2.5 if side == "backward" else 1)
            forecast = flops / call_seconds(problem, spec, mine) / 1e12
            found[side, d, cell.mask, tokens] = (forecast, cell.speeds["tilewise"][1])
    return found


NARROW, WIDE, SHORT = (128, 128), (192, 128), (128, 64)
TIMED_TILES = (
    *((f"d64 {name}", NARROW, "narrowL0", WIDE, "wide") for name in ("full 512", "causal 512", "causal 2048")),
    *((f"d64 {name}", NARROW, "narrowL0", WIDE, "now") for name in ("full 2048", "causal 8192", "causal 16384")),
    *((f"d64 {mask} {s}", SHORT, "short64L", NARROW, "narrowL0") for mask in ("full", "causal") for s in (512, 2048)),
    ("d128 full 512", SHORT, "short128L", NARROW, "now"),
    ("d128 causal 512", SHORT, "short128L", NARROW, "full128"),
    ("d128 causal 2048", SHORT, "short128L", NARROW, "now"),
)
"""Cells of the record in which two tiles took turns: each with the name it has there."""


class Pair(NamedTuple):
    """Two tiles of the Hopper forward: the time of the first in that of the second."""

    cell: str
    first: tuple[int, int]
    second: tuple[int, int]
    measured: float
    predicted: float


def tile_pairs() -> list[Pair]:
    from tilewise.backends import plans
    from tilewise.hardware import lookup
    from tilewise.masks import parse
    from tilewise.model import evaluate
    from tilewise.problem import Problem

    spec, timed = lookup("h200"), load("hopper-forward-h200")["levers, TFLOP/s (p20, p50, p80)"]["tiles"]
    found = []
    for cell, first, one, second, other in TIMED_TILES:
        dim, mask, tokens = cell.split()
        d, s = int(dim[1:]), int(tokens)
        problem = Problem.of(batch=16384 // s, heads=2048 // d, seqlen=s, head_dim=d, device="cuda", mask=parse(mask))
        tiles = {tile.sizes: tile for tile in plans.choices("hopper", problem, spec, "forward")}
        seconds = [evaluate(problem, spec, tiles[sizes]).seconds for sizes in (first, second)]
        found.append(Pair(cell, first, second, timed[cell][other][1] / timed[cell][one][1], seconds[0] / seconds[1]))
    return found
