"""Pictures of the Hopper kernel: its roles with their barriers, and its pipeline in time."""

from __future__ import annotations

from collections.abc import Callable

from tools.site.pipeline import CONFIG, Event, simulate
from tools.site.svg import arrow, box, drawing, line, rect, text

Words = Callable[[str, str], str]


def roles(say: Words) -> tuple[str, str]:
    """Who loads, who computes, and the barriers between them."""
    keys, stages = CONFIG.BLOCK_N, CONFIG.KV_STAGES
    parts = [
        rect(10, 10, 640, 46, "slow"),
        text(24, 38, say("memory (HBM, L2)", "显存（HBM、L2）"), anchor="start"),
        text(250, 38, "Q, K, V"),
        text(560, 38, "O, LSE"),
        box(20, 96, 130, 60, "mid", (say("producer", "生产者"), say("one warp, TMA", "一个 warp，TMA"))),
        arrow(85, 94, 85, 58),
        text(94, 80, say("asks", "请求"), anchor="start", kind="small"),
        rect(190, 86, 240, 190, "fast"),
        text(310, 268, say("shared memory: rings", "共享内存：环形缓冲"), kind="small"),
        arrow(250, 58, 250, 96),
    ]
    rows = (("Q", f"2 × {CONFIG.Q_STAGES}", 64), ("K", str(stages), keys), ("V", str(stages), keys))
    for i, (name, count, tall) in enumerate(rows):
        y = 100 + 54 * i
        said = say(f"{name}: {count} stages of {tall} rows", f"{name}：{count} 级，每级 {tall} 行")
        parts.append(rect(204, y, 212, 42, "mid"))
        parts.append(text(310, y + 18, said, kind="small"))
        parts.append(text(310, y + 34, say("full, empty barriers", "full、empty 屏障"), kind="small mark-text"))
    for group in range(CONFIG.WARPGROUPS):
        y = 96 + 96 * group
        lines = (
            say(f"consumer {group}", f"消费者 {group}"),
            say("64 queries, 4 warps", "64 个查询，4 个 warp"),
            say("S, P, O, m, l in registers", "S、P、O、m、l 在寄存器里"),
        )
        parts.append(box(470, y, 180, 72, "partial", lines))
        parts.append(arrow(430, y + 28, 468, y + 28))
        parts.append(arrow(468, y + 50, 432, y + 50, marked=True))
    parts += [
        arrow(150, 116, 188, 116),
        arrow(188, 142, 152, 142, marked=True),
        line(560, 170, 560, 190, dashed=True),
        text(568, 184, say("take turns", "轮流"), anchor="start", kind="small mark-text"),
        arrow(610, 94, 610, 58),
        text(602, 80, say("TMA store", "TMA 写出"), anchor="end", kind="small"),
        text(150, 304, say("→ full: the tile has landed", "→ full：分块已到"), anchor="start", kind="small"),
        text(370, 304, say("← empty: all readers are done", "← empty：读者都用完了"), anchor="start", kind="small"),
    ]
    title = say("The roles of a Hopper program, and what they wait for", "Hopper 程序中的角色，以及它们等待什么")
    return drawing(660, 316, title, *parts), title


def _bar(event: Event, scale: float, left: float, top: float, kind: str, words: str) -> str:
    x, width = left + scale * event.start, scale * (event.end - event.start)
    return rect(x, top, width, 26, kind, round_=2) + text(x + width / 2, top + 18, words, kind="small")


def pipeline(say: Words) -> tuple[str, str]:
    """The first key tiles of a work tile: loads, products and softmax, with one tile's waits drawn."""
    count = 4
    run = simulate(count)
    left, width = 96.0, 640.0
    scale = (width - left - 10) / run.end()
    tops = {"load": 26.0, "product": 92.0, 0: 158.0, 1: 224.0}
    names = {
        "load": (say("loads", "载入"), "TMA"),
        "product": (say("products", "乘法"), say("tensor cores", "张量核")),
        0: (say("softmax", "softmax"), say("warpgroup 0", "warpgroup 0")),
        1: (say("softmax", "softmax"), say("warpgroup 1", "warpgroup 1")),
    }
    parts = []
    for key, top in tops.items():
        parts.append(text(8, top + 11, names[key][0], anchor="start", kind="small"))
        parts.append(text(8, top + 25, names[key][1], anchor="start", kind="small"))
    colours = ("partial", "fast")
    for event in run.events:
        if event.role == "load":
            kind = "slow" if event.name == "K" else "mid"
            parts.append(_bar(event, scale, left, tops["load"], kind, f"{event.name}{event.tile}"))
        elif event.role == "product":
            parts.append(_bar(event, scale, left, tops["product"], colours[event.group], f"{event.name}{event.tile}"))
        else:
            parts.append(_bar(event, scale, left, tops[event.group], colours[event.group], f"P{event.tile}"))

    def wait(first: Event, second: Event, from_: float, to: float) -> str:
        return arrow(left + scale * first.end, from_, left + scale * second.start, to, marked=True)

    load, scores = run.of("K", 1), run.of("S", 1, 0)
    parts.append(wait(load, scores, tops["load"] + 28, tops["product"] - 2))
    parts.append(wait(scores, run.of("P", 1, 0), tops["product"] + 28, tops[0] - 2))
    last = run.of("S", 1, 1)
    parts.append(wait(last, run.of("P", 1, 1), tops["product"] + 28, tops[1] - 2))
    parts.append(wait(run.of("S", 0, 1), run.of("K", run.stages), tops["product"] - 2, tops["load"] + 28))
    end = left + scale * run.end()
    parts += [line(left, 268, end, 268), text(end, 284, say("time →", "时间 →"), anchor="end", kind="small")]
    notes = (
        say("full: S1 waits until K1 has landed", "full：S1 等 K1 到达"),
        say(f"empty: K{run.stages} waits until both have read K0", f"empty：K{run.stages} 等两组都读完 K0"),
    )
    parts += [text(left, 284 + 16 * i, note, anchor="start", kind="small mark-text") for i, note in enumerate(notes)]
    title = say(
        f"The first {count} key tiles at head dim 128, in clocks of the model: softmax P runs under products of both warpgroups",
        f"头维度 128 时的前 {count} 个键块，按模型的时钟数：softmax P 与两组的乘法同时进行",
    )
    return drawing(640, 310, title, *parts), title


KERNEL_PICTURES: dict[str, Callable[[Words], tuple[str, str]]] = {"roles": roles, "pipeline": pipeline}
