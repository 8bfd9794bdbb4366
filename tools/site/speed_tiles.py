"""Tables of what was swept, predicted and read from caches, drawn from the records like those of `speed`."""

from __future__ import annotations

from typing import Any

from tools.site.records import length, load
from tools.site.tables import Words, range_of, source_line, table_of


def sweep(say: Words) -> list[str]:
    names = ("sweep-n1-2026-11-16", "sweep-xeon-2026-11-19")
    records = [load(name) for name in names]
    xeon = {row["name"]: row for row in records[1]["rows"]}
    rows = []
    for row in records[0]["rows"]:
        rows.append([row["name"], row["pass"]])
        for one in (row, xeon[row["name"]]):
            planned = say(f"{one['planned']} of {len(one['tiles'])}", f"{one['planned']}，共 {len(one['tiles'])} 种")
            rows[-1] += [planned, one["fastest"], f"{one['ratio']:.3f}"]
    over = say("time over its", "规划用时与之比")
    head = ["", say("pass", "方向")]
    for machine in ("N1", "Xeon"):
        head += [f"{machine}{say(': planned', '：规划')}", say("fastest", "最快"), over]
    machines = (say("Neoverse N1, 2 threads", "Neoverse N1，2 线程"), say("Xeon (AVX-512), 2 threads", "Xeon（AVX-512），2 线程"))
    sources = [source_line(name, record, machine) for name, record, machine in zip(names, records, machines, strict=True)]
    return ["  \n".join(sources), *table_of(head, rows)]


def sweep_gpu(say: Words) -> list[str]:
    rows, sources = [], []
    for name in ("sweep-hopper-h200-2026-11-19", "sweep-triton-h200-2026-11-19"):
        record = load(name)
        sources.append(source_line(name, record, "H200"))
        groups: dict[str, list[Any]] = {}
        for row in record["rows"]:
            dtype = "fp32" if row["name"].startswith("float32") else "bf16"
            groups.setdefault(f"{row['backend']}, {dtype}, {row['pass']}", []).append(row)
        for group, found in groups.items():
            worst = max(found, key=lambda row: row["ratio"])
            counts = sorted(len(row["tiles"]) for row in found)
            tiles = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            first = str(sum(row["planned"] == row["fastest"] for row in found))
            where = "" if worst["ratio"] == 1 else f"{worst['name']}: {worst['planned']}, {worst['fastest']}"
            rows.append([group, str(len(found)), tiles, first, f"{worst['ratio']:.3f}", where])
    head = ["", say("rows", "行数"), say("tiles a row", "每行分块数"), say("planner's the fastest in", "规划即最快")]
    head += [say("time over the fastest, at most", "规划用时比最快，至多"), say("there: planned, fastest", "该处：规划、最快")]
    return ["  \n".join(sources), *table_of(head, rows)]


def predicted(say: Words) -> list[str]:
    from tools.site.summary import predictions

    chosen = [(64, "full", 8192), (128, "full", 2048), *((d, mask, 8192) for d in (128, 256) for mask in ("full", "causal"))]
    found = predictions()
    rows = []
    for d, mask, tokens in chosen:
        figures = [figure for side in ("forward", "backward") for figure in found[side, d, mask, tokens]]
        rows.append([f"{d} {mask} {length(tokens)}", *(f"{figure:.0f}" for figure in figures)])
    off = [forecast / measured - 1 for forecast, measured in found.values()]
    measured = say("measured", "实测")
    forecasts = [say("forward predicted", "前向预测"), say("backward predicted", "反向预测")]
    head = [say("d, mask, S", "d、掩码、S"), forecasts[0], measured, forecasts[1], measured]
    worst, average = max(abs(one) for one in off) * 100, sum(abs(one) for one in off) / len(off) * 100
    told = say(
        f"Useful TFLOP/s. All {len(off)} cells of the plain grid: at most {worst:.1f} % off, {average:.1f} % on average.",
        f"有效 TFLOP/s。整个网格共 {len(off)} 格：最多相差 {worst:.1f} %，平均 {average:.1f} %。",
    )
    return [*table_of(head, rows)[1:], told]


def tiles(say: Words) -> list[str]:
    from tools.site.summary import tile_pairs

    name, found = "hopper-forward-h200", tile_pairs()
    head = ["", say("time of", "用时"), say("in that of", "相对于"), say("measured", "实测"), say("predicted", "预测")]
    rows = []
    for one in found:
        sizes = ("×".join(map(str, pair)) for pair in (one.first, one.second))
        rows.append([one.cell, *sizes, f"{one.measured:.2f}", f"{one.predicted:.2f}"])
    return [source_line(name, load(name), "H200"), *table_of(head, rows)]


def cache_gpu(say: Words) -> list[str]:
    """Pages of 16 by the bytes that a call reads, and the other kinds of case."""
    name = "cache-h200-2026-11-19"
    record = load(name)
    kinds: dict[str, list[Any]] = {}
    bounds = ((256 << 20, say("256 MiB and more", "256 MiB 及以上")), (32 << 20, "32–256 MiB"), (0, say("less", "更少")))
    for row in record["rows"]:
        kind = row["name"].rpartition(" ")[0]
        size = next(word for least, word in bounds if row["bytes"] >= least)
        pages = say("pages of 16, K and V: ", "16 个 token 的页，K 与 V：") + size
        kinds.setdefault(pages if kind == "decode/16" else f"`{kind}`", []).append(row)
    names = {"cache-cudnn": say("cuDNN, contiguous rows", "cuDNN，连续的行")}
    names["contiguous"] = say("own contiguous memory", "自己的连续内存")
    names["plain"] = say("bf16 pages, or the call without it", "bf16 页，或没有该功能的调用")
    rows = []
    for kind, found in sorted(kinds.items(), key=lambda item: "decode" not in item[1][0]["name"]):
        rates = [row["bytes"] / row["us"]["tilewise"][1] * 1e-6 for row in found]
        own = [row["least"]["contiguous"][1] for row in found if row["least"]]
        beside = [names[found[0]["rival"]], range_of(row["ratio"][1] for row in found), range_of(own) if own else ""]
        rows.append([kind, str(len(found)), range_of(rates), *beside])
    head = ["", say("cells", "格数"), "TB/s", say("beside", "对手"), say("ratio", "比值")]
    head.append(say("beside own contiguous", "与自己的连续内存之比"))
    return [source_line(name, record, "H200"), *table_of(head, rows)]
