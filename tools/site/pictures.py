"""The pictures of the site, drawn while it is built. What they say of machines and masks is asked of the package itself."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np
from tools.site.kernel_pictures import KERNEL_PICTURES
from tools.site.mask_pictures import MASKS as MASKS
from tools.site.mask_pictures import mask_picture
from tools.site.svg import arrow, box, drawing, line, rect, text

from tilewise.hardware import lookup
from tilewise.hardware.spec import KiB, MiB
from tilewise.lab.simulator.timeline import timeline

Words = Callable[[str, str], str]
"""Picks the page's language of (English, Chinese)."""


def memory(say: Words) -> tuple[str, str]:
    a100 = lookup("a100")
    shared = 128 * a100.units * a100.clock_hz
    levels = [
        (
            "fast",
            say("registers", "寄存器"),
            f"{a100.register_bytes // KiB} KiB / SM · {a100.register_bytes * a100.units / MiB:.0f} MiB",
            say("operands of every instruction", "每条指令的操作数"),
        ),
        (
            "fast",
            say("shared memory (SRAM)", "共享内存（SRAM）"),
            f"{a100.sram_bytes // KiB} KiB / SM · {a100.sram_bytes * a100.units / MiB:.1f} MiB",
            f"{shared / 1e12:.1f} TB/s",
        ),
        ("mid", "L2", f"{a100.l2_bytes // MiB} MiB", f"{a100.l2_bandwidth / 1e12:.1f} TB/s"),
        (
            "slow",
            say("memory (HBM)", "显存（HBM）"),
            f"{a100.dram_bytes >> 30} GiB",
            f"{a100.dram_bandwidth / 1e12:.2f} TB/s",
        ),
    ]
    parts = []
    for i, (kind, name, size, speed) in enumerate(levels):
        width = 360 + 80 * i
        parts.append(box(310 - width / 2, 10 + 88 * i, width, 60, kind, (name, f"{size} · {speed}")))
        if i:
            parts.append(arrow(310, 70 + 88 * (i - 1) + 2, 310, 10 + 88 * i - 2, both=True))
    title = say(
        "The memory of an A100: each level is larger and slower than the one above",
        "A100 的存储层次：越往下越大，也越慢",
    )
    return drawing(620, 350, title, *parts), title


def standard(say: Words) -> tuple[str, str]:
    names = (("S = QKᵀ", "Q, K", "S"), ("P = softmax(S)", "S", "P"), ("O = PV", "P, V", "O"))
    parts = [rect(10, 150, 600, 60, "slow"), text(310, 200, say("memory (HBM)", "显存（HBM）"), kind="small")]
    for i, (kernel, reads, writes) in enumerate(names):
        x = 30 + 200 * i
        parts.append(box(x, 20, 160, 54, "fast", (kernel, say(f"kernel {i + 1}", f"内核 {i + 1}"))))
        parts.append(arrow(x + 45, 150, x + 45, 76))
        parts.append(arrow(x + 115, 76, x + 115, 150, marked=writes != "O"))
        parts.append(text(x + 38, 118, reads, anchor="end"))
        parts.append(text(x + 123, 118, writes, anchor="start", kind="mark-text" if writes != "O" else ""))
    title = say(
        "Standard attention as three kernels: the N × N matrices S and P go out to memory and come back",
        "标准注意力的三个内核：N × N 的 S 与 P 写回显存，又读出来",
    )
    return drawing(620, 220, title, *parts), title


def flow(say: Words) -> tuple[str, str]:
    """Memory, shared memory and registers: where each tile of the forward lives, and how often it moves."""
    title = say(
        "One fused kernel: memory, shared memory, registers, and how often each tile moves between them",
        "一个融合内核：显存、共享内存、寄存器，以及各个分块在其间移动的次数",
    )
    return drawing(620, 366, title, *flow_parts(say)), title


def flow_parts(say: Words) -> list[str]:
    return [
        rect(10, 10, 600, 56, "slow"),
        text(24, 30, say("memory (HBM)", "显存（HBM）"), anchor="start", kind="small"),
        rect(10, 116, 600, 76, "mid"),
        text(410, 182, say("shared memory", "共享内存"), anchor="start", kind="small"),
        rect(10, 236, 600, 120, "fast"),
        text(24, 346, say("registers", "寄存器"), anchor="start", kind="small"),
        *(text(x, 52, name) for x, name in ((90, "Q"), (230, "K"), (370, "V"), (540, "O, LSE"))),
        *(arrow(x, 58, x, 144) for x in (90, 230, 370)),
        arrow(540, 258, 540, 58),
        text(98, 96, say("once", "一次"), anchor="start", kind="small"),
        text(238, 88, say("once for each", "每个 Q 块"), anchor="start", kind="small"),
        text(238, 104, say("block of Q", "各一次"), anchor="start", kind="small"),
        text(548, 96, say("once", "一次"), anchor="start", kind="small"),
        box(60, 146, 60, 32, "slow", ("Qᵢ",)),
        box(200, 146, 60, 32, "slow", ("Kⱼ",)),
        box(340, 146, 60, 32, "slow", ("Vⱼ",)),
        box(70, 264, 120, 42, "partial", ("S = QᵢKⱼᵀ",)),
        box(240, 264, 140, 42, "partial", ("P = exp(S − m)",)),
        rect(450, 258, 150, 60, "full"),
        text(525, 285, "α·O + P·Vⱼ", kind="on-full"),
        text(525, 303, "m, l, α", kind="small on-full"),
        arrow(92, 178, 112, 262),
        arrow(222, 178, 165, 262),
        arrow(190, 285, 238, 285),
        arrow(380, 285, 448, 285),
        arrow(378, 178, 468, 256),
        text(235, 336, say("S and P never leave the chip", "S 与 P 从不离开芯片"), kind="small mark-text"),
    ]


def eight(say: Words) -> tuple[str, str]:
    """An 8 × 8 matrix of scores in tiles of 4 × 2, numbered in the order in which they are computed."""
    cell, left, top = 34, 90, 40
    parts = []
    for i in range(8):
        parts.append(text(left - 14, top + cell * (i + 0.65), f"q{i}", anchor="end", kind="small"))
        parts.append(text(left + cell * (i + 0.5), top - 10, f"k{i}", kind="small"))
        parts += [rect(left + cell * j, top + cell * i, cell, cell, "empty", round_=0) for j in range(8)]
    for block in range(2):
        for j in range(4):
            x, y = left + 2 * cell * j, top + 4 * cell * block
            parts.append(f'<rect x="{x}" y="{y}" width="{2 * cell}" height="{4 * cell}" class="mark" stroke-width="2"/>')
            parts.append(f'<circle cx="{x + cell}" cy="{y + 2 * cell}" r="12" class="paper" style="stroke: var(--tw-mark)"/>')
            parts.append(text(x + cell, y + 2 * cell + 5, str(1 + 4 * block + j)))
    right = left + 8 * cell + 30
    for block in range(2):
        y = top + 4 * cell * block + 40
        rows = f"q{4 * block}…q{4 * block + 3}"
        kept = say(f"rows {rows}: m, l, acc stay on chip", f"{rows} 行：m、l、acc 留在片上")
        once = say("written once, after the last tile", "最后一块之后写出一次")
        parts += [text(right, y, kept, anchor="start"), text(right, y + 24, once, anchor="start", kind="small")]
    title = say(
        "8 × 8 scores in tiles of 4 queries × 2 keys, in the order of the loops",
        "8 × 8 的分数，按 4 个查询 × 2 个键分块，编号是循环的顺序",
    )
    return drawing(700, 330, title, *parts), title


def loops(say: Words) -> tuple[str, str]:
    parts = []
    heads = (
        say("v1: K/V outside, Q inside", "v1：外循环 K/V，内循环 Q"),
        say("v2: Q outside, K/V inside", "v2：外循环 Q，内循环 K/V"),
    )
    for side, (head, outer) in enumerate(zip(heads, ("kv", "q"), strict=True)):
        left, top, cell = 40 + 310 * side, 60, 52
        parts.append(text(left + 2 * cell, 24, head))
        for i in range(4):
            for j in range(4):
                number = 1 + (4 * j + i if outer == "kv" else 4 * i + j)
                parts.append(rect(left + cell * j, top + cell * i, cell, cell, "mid", round_=0))
                parts.append(text(left + cell * (j + 0.5), top + cell * (i + 0.6), str(number)))
        if outer == "kv":
            parts.append(arrow(left + 10, top - 6, left + 10, top + 4 * cell + 10, marked=True))
            said = say("m, l, acc: read and written in every tile", "m、l、acc：每一块都读写一遍")
        else:
            parts.append(arrow(left - 12, top + 10, left + 4 * cell + 8, top + 10, marked=True))
            said = say("m, l, acc: on chip along a row", "m、l、acc：整行都在片上")
        parts.append(text(left + 2 * cell, top + 4 * cell + 34, said, kind="small"))
        parts.append(text(left + 2 * cell, 44, say("columns: K/V blocks", "列：K/V 块"), kind="small"))
    title = say("The same sixteen tiles, in the two loop orders", "同样的十六块，两种循环顺序")
    return drawing(620, 320, title, *parts), title


def splits(say: Words) -> tuple[str, str]:
    parts = [box(20, 90, 100, 50, "mid", (say("one query", "一个查询"),))]
    for i in range(4):
        y = 16 + 54 * i
        parts.append(box(190, y, 150, 40, "fast", (say(f"keys, part {i + 1}", f"第 {i + 1} 段键"),)))
        parts.append(arrow(120, 115, 188, y + 20))
        parts.append(text(350, y + (12 if i < 2 else 36), "(O, LSE)", anchor="start", kind="small"))
        way = f"M340 {y + 20} H408 L458 {100 + 10 * i}"
        parts.append(f'<path d="{way}" class="line" stroke-width="1.6" marker-end="url(#tw-arrow)"/>')
    parts.append(rect(460, 85, 130, 60, "full"))
    parts.append(text(525, 120, say("merge", "合并"), kind="on-full"))
    title = say(
        "Split, then merge: parts of the keys side by side, joined by their log-sum-exp",
        "先切分，再合并：各段键并行计算，按 log-sum-exp 合并",
    )
    return drawing(620, 236, title, *parts), title


def call(say: Words) -> tuple[str, str]:
    """The way of q, as docs/design.md tells it."""
    steps = (
        ("api/call_cache.py", say("a call like an earlier one? then straight to its launch", "与之前的调用相同？直接启动")),
        ("api/parse.py", say("checks; makes a Problem", "检查；生成 Problem")),
        ("ops/", say("autograd; operators of torch", "自动求导；torch 算子")),
        ("backends/…/plan.py", say("tiles for this problem and machine", "为该问题与机器选分块")),
        ("backends/…", say("the kernel runs", "内核执行")),
    )
    parts = []
    for i, (name, does) in enumerate(steps):
        y = 46 + 62 * i
        last = i == len(steps) - 1
        parts.append(rect(60, y, 170, 40, "full" if last else "fast"))
        parts.append(text(145, y + 25, name, kind="on-full" if last else ""))
        parts.append(text(250, y + 25, does, anchor="start"))
        parts.append(arrow(145, y - 20, 145, y - 2))
    parts.append(text(145, 20, "tw.attention(q, k, v, mask=…)"))
    around = f"M58 {46 + 20} H30 V{46 + 62 * 4 + 20} H56"
    parts.append(f'<path d="{around}" class="line" stroke-width="1.6" marker-end="url(#tw-arrow)"/>')
    parts.append(box(478, 108, 132, 40, "mid", ("dispatch",)))
    parts.append(text(544, 166, say("who serves it, and why", "由谁处理，为什么"), kind="small"))
    parts.append(text(544, 182, say("not the others", "别的为什么不行"), kind="small"))
    parts.append(arrow(446, 128, 476, 128, both=True))
    title = say("The path of a call through the layers", "一次调用穿过各层的路径")
    return drawing(620, 350, title, *parts), title


def buffers(say: Words) -> tuple[str, str]:
    """Four tiles that load in 2 and compute in 1, with one buffer and with two: times are the simulator's."""
    parts, y, unit, left = [], 20, 42, 100
    for stages in (1, 2):
        run = timeline([2.0] * 4, [1.0] * 4, stages)
        head = say(f"{stages} buffer{'s' * (stages > 1)}: {run.total:g}", f"{stages} 个缓冲：{run.total:g}")
        parts.append(text(10, y + 4, head, anchor="start"))
        for buffer in range(stages):
            row = y + 14 + 34 * buffer
            parts.append(text(left - 10, row + 20, "AB"[buffer], anchor="end", kind="small"))
            for event in (event for event in run.events if event.buffer == buffer):
                kind = "slow" if event.kind == "load" else "fast"
                said = say(event.kind, "载入" if event.kind == "load" else "计算")
                width = unit * (event.end - event.start)
                parts.append(rect(left + unit * event.start, row, width, 28, kind, round_=0))
                words = f"{said} {event.step + 1}" if width > unit else str(event.step + 1)
                parts.append(text(left + unit * event.start + width / 2, row + 19, words, kind="small"))
        y += 40 + 34 * stages
    title = say("Four tiles that load in 2 and compute in 1", "四个分块，每块载入用 2，计算用 1")
    return drawing(620, y, title, *parts), title


def roof(say: Words) -> tuple[str, str]:
    """The seed's A100: 312 TFLOP/s, 2 TB/s, ridge at 156 FLOP/B; standard attention at 33."""
    peak, bandwidth, standard_at = 312.0, 2.0, 65.25 / 2
    ridge = peak / bandwidth

    def x(intensity: float) -> float:
        return 80 + 150 * np.log10(intensity)

    def y(tflops: float) -> float:
        return 250 - 85 * (np.log10(tflops) - 0.3)

    place = y(standard_at * bandwidth)
    parts = [
        line(80, 250, 590, 250),
        line(80, 250, 80, 20),
        f'<path d="M{x(1):g} {y(2):g} L{x(ridge):g} {y(peak):g} L{x(2000):g} {y(peak):g}" class="mark" stroke-width="2.2"/>',
        line(x(ridge), y(peak), x(ridge), 250, dashed=True),
        line(x(standard_at), place, x(standard_at), 250, dashed=True),
        f'<circle cx="{x(standard_at):g}" cy="{place:g}" r="5" class="full"/>',
        text(x(standard_at) - 10, place - 8, say("standard attention", "标准注意力"), anchor="end", kind="small"),
        text(x(ridge), 268, f"{ridge:g}", kind="small"),
        text(x(standard_at), 268, f"{standard_at:.0f}", kind="small"),
        text(x(500), y(peak) - 10, f"{peak:g} TFLOP/s", kind="small"),
        text(x(3), y(2 * 3) - 22, f"{bandwidth:g} TB/s", kind="small"),
        text(335, 290, say("FLOP for each byte moved (logarithmic)", "每搬运一个字节的运算量（对数坐标）"), kind="small"),
    ]
    title = say("The roofline of an A100, with the figures of the tutorial", "A100 的屋顶线，采用教程的数字")
    return drawing(620, 300, title, *parts), title


PICTURES: dict[str, Callable[[Words], tuple[str, str]]] = {
    "memory": memory,
    "standard": standard,
    "flow": flow,
    "eight": eight,
    "loops": loops,
    "splits": splits,
    "call": call,
    "buffers": buffers,
    "roof": roof,
    **KERNEL_PICTURES,
}


def figure(name: str, language: str) -> str:
    """A picture as part of a page. Raises KeyError for a name that is none."""

    def say(english: str, chinese: str) -> str:
        return chinese if language == "zh" else english

    if name.startswith("mask-"):
        svg, title = mask_picture(name.removeprefix("mask-"), say)
    else:
        svg, title = PICTURES[name](say)
    kind = "tw-picture narrow" if name.startswith("mask-") else "tw-picture"
    return f'<figure class="{kind}"><div class="tw-scroll">{svg}</div><figcaption>{escape(title)}</figcaption></figure>'
