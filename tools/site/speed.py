"""Tables of speed, drawn from the records in benchmarks/results: a page names the table, and nobody types a figure.

    <!-- speed: hopper-forward -->
    the table
    <!-- /speed -->

`python -m tools.site.speed --write` puts the tables into the pages, so that they can be read without the site; `make docs` draws
them anew, and a test holds the pages to them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tools.site.records import ROOT, Cell, hopper_cells, length, load, mean, plain, ratios, seconds, shown
from tools.site.speed_tiles import cache_gpu, predicted, sweep, sweep_gpu, tiles
from tools.site.tables import Words, cell_text, range_of, source_line, spread_of, table_of

_MARK = re.compile(r"(<!-- speed: ([\w-]+) -->\n).*?(<!-- /speed -->)", re.DOTALL)
_PEERS = {"sdpa-flash": "FlashAttention-2", "sdpa-efficient": "memory-efficient", "sdpa-cudnn": "cuDNN", "sdpa": "SDPA"}
_PEERS |= {"fa4": "FlashAttention-4", "fa4-packed": "FlashAttention-4", "flex": "FlexAttention"}
LENGTHS = (512, 2048, 8192, 16384)


def hopper_grid(side: str) -> Callable[[Words], list[str]]:
    def draw(say: Words) -> list[str]:
        name = f"hopper-{side}-h200"
        record = load(name)
        every = hopper_cells(record)
        cells = plain(every)
        rows = []
        for d, mask in sorted({(cell.head_dim, cell.mask) for cell in cells}, key=lambda one: (one[0], one[1] != "full")):
            row = {cell.tokens: cell for cell in cells if (cell.head_dim, cell.mask) == (d, mask)}
            rows.append([str(d), mask, *(f"{row[n].speeds['tilewise'][1]:.0f} ({shown(row[n].ratio)})" for n in LENGTHS)])
        found = [cell.ratio for cell in cells]
        cudnn = [cell.speeds["tilewise"][1] / cell.speeds["cudnn"][1] for cell in cells]
        told = say(
            f"TFLOP/s, in brackets the ratio to the better of cuDNN and FlashAttention-4. Of {len(cells)} cells: geometric mean "
            f"{mean(found):.2f}, lowest {min(found):.3f}, highest {max(found):.2f}; of cuDNN alone {mean(cudnn):.2f}.",
            f"TFLOP/s，括号内为与 cuDNN、FlashAttention-4 中较快者之比。共 {len(cells)} 格：几何平均 {mean(found):.2f}，最低 "
            f"{min(found):.3f}，最高 {max(found):.2f}；只与 cuDNN 相比为 {mean(cudnn):.2f}。",
        )
        return [
            source_line(name, record, "H200"),
            *table_of(["d", say("mask", "掩码"), *(length(n) for n in LENGTHS)], rows),
            told,
        ]

    return draw


def hopper_cell_table(side: str) -> Callable[[Words], list[str]]:
    def draw(say: Words) -> list[str]:
        name = f"hopper-{side}-h200"
        record = load(name)

        def speed(cell: Cell, who: str) -> str:
            if who not in cell.speeds:
                return ""
            p20, p50, p80 = cell.speeds[who]
            return f"{p50:.0f} ({p20:.0f}–{p80:.0f})"

        def ratio(cell: Cell) -> str:
            return f"{cell.ratio:.3f}" if {"cudnn", "fa4"} & set(cell.speeds) else ""

        rows = [
            [
                str(cell.head_dim),
                f"{cell.mask} {cell.extra}".strip(),
                length(cell.tokens),
                *(speed(cell, who) for who in ("tilewise", "cudnn", "fa4")),
                ratio(cell),
            ]
            for cell in hopper_cells(record)
        ]
        head = ["d", say("mask", "掩码"), say("tokens", "长度"), "tilewise", "cuDNN", "FlashAttention-4", say("ratio", "比值")]
        told = say("TFLOP/s: median (p20–p80). The ratio is to the better peer.", "TFLOP/s：中位数 (p20–p80)，比值以较快者为准。")
        return [source_line(name, record, "H200"), *table_of(head, rows), told]

    return draw


GPU = "gpu-2026-11-15"
_GROUPS = ("forward", "backward", "float32 forward", "float32 backward")
_COLUMNS = (("full", 64), ("causal", 64), ("full", 128), ("causal", 128))


def gpu_summary(say: Words) -> list[str]:
    record = load(GPU)
    rows = []
    for group in _GROUPS:
        peer = _PEERS["sdpa-efficient" if "32" in group else "sdpa-flash"]
        parts = [ratios(record, rf"{group} {mask} d{d} ") for mask, d in _COLUMNS]
        every = [one for part in parts for one in part]
        cells = [f"{mean(part):.2f} ({range_of(part)})" for part in parts]
        name = {"forward": say("forward", "前向"), "backward": say("backward", "反向")}[group.split()[-1]]
        rows.append([f"{'float32' if '32' in group else 'bfloat16'} {name}", peer, *cells, f"{mean(every):.2f}"])
    head = ["", say("beside SDPA's", "SDPA 的"), *(f"d {d} {mask}" for mask, d in _COLUMNS), say("all", "全部")]
    told = say("Ratio of speed: geometric mean over the lengths (lowest–highest).", "速度之比：各长度的几何平均（最低–最高）。")
    return [source_line(GPU, record, "H200"), *table_of(head, rows), told]


def gpu_cells(say: Words) -> list[str]:
    record = load(GPU)
    rows: dict[str, dict[int, str]] = {}
    for row in record["records"]:
        found = re.fullmatch(r"(.+ d\d+) (\d+)", row["case"]["name"])
        if found:
            rows.setdefault(found[1], {})[int(found[2])] = spread_of(row["ratio"])
    lengths = sorted({tokens for row in rows.values() for tokens in row})
    head = [say("pass, mask, head dim", "方向、掩码、头维度"), *(length(tokens) for tokens in lengths)]
    return [
        source_line(GPU, record, "H200"),
        *table_of(head, ([name, *(row.get(tokens, "") for tokens in lengths)] for name, row in rows.items())),
        say("Ratio of speed: median (p20–p80).", "速度之比：中位数 (p20–p80)。"),
    ]


def gpu_decode(say: Words) -> list[str]:
    parts = "gpu-parts-2026-11-15"
    record, suite = load(parts), load(GPU)
    through = {}
    for row in suite["records"]:
        case = row["case"]
        if case["name"].startswith("decode"):
            through[f"B {case['batch']} {case['heads']}/{case['kv_heads']} {case['kv_seqlen']}"] = spread_of(row["ratio"])
    runs: dict[str, list[list[str]]] = {}
    for row in record["records"]:
        found = re.fullmatch(r"decode (.+): [\d.]+", row["case"])
        if found:
            rates = [f"{row['work'] / row['ms'][who]['p50'] / 1e9:.2f}" for who in ("plan", "cudnn")]
            runs.setdefault(found[1], []).append(rates)
    head = [
        say("sequences, heads, keys", "序列、头、键"),
        "tilewise",
        "cuDNN",
        say("earlier run", "较早一次"),
        say("ratio through `tw.attention`", "经 `tw.attention` 的比值"),
    ]
    rows = [
        [name, *run[-1], " / ".join(run[0]) if len(run) > 1 else "", through.get(name, "")] for name, run in sorted(runs.items())
    ]
    told = say(
        "Bytes of K and V over the time of the kernels, TB/s. The last column counts host time as well.",
        "K 与 V 的字节数除以内核时间，TB/s。最后一列把主机时间也算在内。",
    )
    return [source_line(parts, record, "H200"), *table_of(head, rows), told]


def gpu_host(say: Words) -> list[str]:
    name = "gpu-parts-2026-11-15"
    record = load(name)
    rows = [[row["case"].removeprefix("host "), spread_of(row["us"], 1)] for row in record["records"] if "us" in row]
    return [source_line(name, record, "H200"), *table_of([say("tiny call", "极小的调用"), "µs (p20–p80)"], rows)]


def gpu_rows(name: str) -> Callable[[Words], list[str]]:
    """Cases of one record beside the fastest of those they are measured against, in one interleaved run."""

    def draw(say: Words) -> list[str]:
        record = load(name)
        rows = []
        for row in record["rows"]:
            beside = say("the plain call", "没有该功能的调用") if row["rival"] == "plain" else _PEERS[row["rival"]]
            times = [spread_of(row["seconds"][who], 0, 1e6) for who in ("tilewise", row["rival"])]
            rows.append([row["case"], cell_text(row["words"]), *times, beside, spread_of(row["ratio"]), f"{row['floor']:g}"])
        head = ["", say("shape", "形状"), "tilewise, µs (p20–p80)", say("the other, µs", "对手，µs"), say("beside", "对手")]
        head += [say("ratio", "比值"), say("floor", "下限")]
        return [source_line(name, record, "H200"), *table_of(head, rows)]

    return draw


N1, XEON, XEON16 = "cpu-2026-11-15", "cpu-avx512-2026-11-15", "cpu-avx512-16-2026-11-15"


def cpu_rows(say: Words) -> list[str]:
    record = load(N1)
    rows = []
    for row in record["records"]:
        floor = row["case"]["floor"]
        time = seconds(row, "tilewise")
        digits = 1 if time["p50"] > 1e-2 else 2 if time["p50"] > 1e-3 else 4
        figures = [spread_of(row["ratio"]), "" if floor is None else f"{floor:g}", spread_of(time, digits, 1e3)]
        beside = say("SDPA on float32", "float32 的 SDPA") if row["rival"] == "sdpa-upcast" else _PEERS[row["rival"]]
        rows.append([row["case"]["name"], cell_text(row["words"]), beside, *figures])
    head = ["", say("shape", "形状"), say("beside", "对手"), say("ratio", "比值"), say("floor", "下限"), "ms (p20–p80)"]
    return [source_line(N1, record, say("Neoverse N1, 2 threads", "Neoverse N1，2 线程")), *table_of(head, rows)]


def xeon_rows(say: Words) -> list[str]:
    two, sixteen = load(XEON), load(XEON16)
    others = {row["case"]["name"]: row for row in sixteen["records"]}
    rows = [
        [row["case"]["name"], cell_text(row["words"]), spread_of(row["ratio"]), spread_of(others[row["case"]["name"]]["ratio"])]
        for row in two["records"]
    ]
    head = ["", say("shape", "形状"), say("2 threads", "2 线程"), say("16 threads", "16 线程")]
    device = say("Xeon with AVX-512 and AMX", "带 AVX-512 与 AMX 的 Xeon")
    told = say("Ratio to SDPA in the same dtype: median (p20–p80).", "与同一数据类型的 SDPA 之比：中位数 (p20–p80)。")
    sources = f"{source_line(XEON, two, device)}\n\n{source_line(XEON16, sixteen, device)}"
    return [sources, *table_of(head, rows), told]


_KINDS = (
    ("full", "无掩码", r"(full|float16|bfloat16|bshd|small)"),
    ("causal", "因果", r"(causal|gqa)"),
    ("cross, few queries", "交叉，查询少", r"cross"),
    ("training", "训练", r"training"),
    ("decode", "解码", r"decode"),
    ("window", "窗口", r"window"),
    ("tiny call", "极小的调用", r"tiny"),
)


def cpu_summary(say: Words) -> list[str]:
    columns = ((N1, "float32"), (XEON, "float32"), (XEON, "bfloat16"), (XEON16, "float32"), (XEON16, "bfloat16"))
    records = {name: load(name) for name in (N1, XEON, XEON16)}
    rows = []
    for english, chinese, pattern in _KINDS:
        parts = [ratios(records[name], pattern, dtype) for name, dtype in columns]
        rows.append([say(english, chinese), *(range_of(part) if part else "" for part in parts)])
    head = [
        "",
        say("N1, 2 threads, fp32", "N1，2 线程，fp32"),
        say("Xeon, 2 threads, fp32", "Xeon，2 线程，fp32"),
        "bf16",
        say("16 threads, fp32", "16 线程，fp32"),
        "bf16",
    ]
    told = say("Lowest and highest ratio to SDPA of the rows of each kind.", "每一类各行与 SDPA 之比的最低与最高值。")
    devices = ("Neoverse N1", "Xeon", "Xeon")
    told_of = [source_line(name, record, device) for (name, record), device in zip(records.items(), devices, strict=True)]
    return ["\n\n".join(told_of), *table_of(head, rows), told]


def cpu_errors(say: Words) -> list[str]:
    rows = []
    for title, names, dtypes in (
        ("Neoverse N1, fp32", (N1,), ("float32",)),
        ("Xeon, fp32", (XEON, XEON16), ("float32",)),
        (say("16-bit dtypes", "16 位类型"), (N1, XEON, XEON16), ("float16", "bfloat16")),
    ):
        found = [row["errors"] for name in names for row in load(name)["records"] if row["case"]["dtype"] in dtypes]
        rows.append([title, *(range_of(one[kind] for one in found) for kind in ("largest", "frobenius"))])
    head = ["", say("largest error, ours to SDPA's", "最大误差，与 SDPA 之比"), say("relative Frobenius", "相对 Frobenius 误差")]
    return table_of(head, rows)[1:-1]


def readme(say: Words) -> list[str]:
    from tools.site.summary import rows

    return table_of(["", say("beside", "对手"), say("ratio", "比值")], rows(say))[1:-1]


TABLES: dict[str, Callable[[Words], list[str]]] = {
    "hopper-forward": hopper_grid("forward"),
    "hopper-backward": hopper_grid("backward"),
    "hopper-forward-cells": hopper_cell_table("forward"),
    "hopper-backward-cells": hopper_cell_table("backward"),
    "gpu": gpu_summary,
    "gpu-cells": gpu_cells,
    "gpu-decode": gpu_decode,
    "gpu-host": gpu_host,
    "masks-gpu": gpu_rows("masks-h200-2026-11-17"),
    "hopper-features": gpu_rows("features-h200-2026-11-17"),
    "cpu": cpu_summary,
    "cpu-n1": cpu_rows,
    "cpu-xeon": xeon_rows,
    "cpu-errors": cpu_errors,
    "cache-gpu": cache_gpu,
    "sweep": sweep,
    "sweep-gpu": sweep_gpu,
    "predicted": predicted,
    "tiles": tiles,
    "readme": readme,
}


def fill(text: str, language: str) -> str:
    """A page with its tables drawn from the records."""

    def say(english: str, chinese: str) -> str:
        return chinese if language == "zh" else english

    return _MARK.sub(lambda found: f"{found[1]}\n{chr(10).join(TABLES[found[2]](say)).strip()}\n\n{found[3]}", text)


def language_of(path: Path) -> str:
    return "zh" if ".zh" in path.name else "en"


def pages() -> list[Path]:
    """Every page that names a table, the READMEs too."""
    every = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("README*.md")]
    return sorted(path for path in every if _MARK.search(path.read_text(encoding="utf-8")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    args = parser.parse_args()
    stale = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        drawn = fill(text, language_of(path))
        if drawn != text:
            stale += 1
            if args.write:
                path.write_text(drawn, encoding="utf-8")
            print(path.relative_to(ROOT), "written" if args.write else "does not follow its records")
    return 1 if stale and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
