"""The playground's form, with the tiles that kernels run: asked of `tilewise.plan` while the site is built."""

from __future__ import annotations

import json
from html import escape
from typing import Any

SCRIPTS = ("words", "parse", "masks", "traffic", "page")
LENGTH, HEADS = 4096, 16
DEVICES = (("h200", "H200", "bfloat16"), ("a100", "A100", "bfloat16"), ("altra-q80", "Neoverse N1", "float32"))
EXAMPLES = (
    "causal",
    "causal & window(512) | prefix(16)",
    "causal & documents([900, 2100, 1096])",
    "causal & (window(512) | prefix(64))",
    "~window(64)",
    "window(256, 256)",
    "key_padding(3000)",
    "causal(offset=700)",
    "blocks([[1,0,0,0],[1,1,0,0],[0,1,1,0],[0,0,1,1]], 1024)",
    "causal & selected([[0,3],[5,1],[9,2],[12,7]], block=256, per=1024)",
)
_NUMBERS = (
    ("queries", "queries Sq", "查询数 Sq", LENGTH),
    ("keys", "keys Sk", "键数 Sk", LENGTH),
    ("blockQ", "tile: queries Br", "分块：查询 Br", 128),
    ("blockK", "tile: keys Bc", "分块：键 Bc", 128),
    ("headDim", "head dim d", "头维 d", 64),
    ("batch", "sequences B", "序列数 B", 1),
    ("heads", "query heads", "查询头数", HEADS),
    ("kvHeads", "key heads", "键头数", HEADS),
)


def presets() -> list[dict[str, Any]]:
    """The forward's tile on each device for head dims 64 and 128, and who runs it."""
    import tilewise as tw

    found = []
    for key, name, dtype in DEVICES:
        for head_dim in (64, 128):
            where = "cpu" if key == "altra-q80" else "cuda"
            problem = tw.Problem.of(
                seqlen=LENGTH, heads=HEADS, head_dim=head_dim, dtype=dtype, mask=tw.causal(), device=where
            )
            plan = tw.plan(problem, key)
            tile = {"headDim": head_dim, "dtype": dtype, "blockQ": plan.tile.block_q, "blockK": plan.tile.block_k}
            found.append({"name": f"{name}, d {head_dim}, {dtype}: {plan.tile} ({plan.figures_of})", **tile})
    return found


def form(language: str, base: str) -> str:
    """The form and the places that the scripts fill; `base` leads from the page to the folder with the scripts."""

    def say(english: str, chinese: str) -> str:
        return chinese if language == "zh" else english

    chips = "".join(f'<button type="button" class="pg-chip">{escape(text)}</button>' for text in EXAMPLES)
    numbers = "".join(
        f'<label>{say(english, chinese)}<input id="pg-{name}" type="number" inputmode="numeric" value="{value}"></label>'
        for name, english, chinese, value in _NUMBERS
    )
    dtypes = "".join(f"<option>{name}</option>" for name in ("bfloat16", "float16", "float32", "float64"))
    kinds = say("EMPTY: skipped|PARTIAL: masked|FULL: no mask needed", "EMPTY：跳过|PARTIAL：需要掩码|FULL：无需掩码")
    legend = "".join(f'<span><i class="pg-{i}"></i>{text}</span>' for i, text in enumerate(kinds.split("|")))
    data = json.dumps(presets()).replace("<", "\\u003c")
    scripts = "".join(f'<script src="{base}/{name}.js"></script>' for name in SCRIPTS)
    return f"""<link rel="stylesheet" href="{base}/page.css">
<div id="pg" data-language="{language}">
<label>{say("mask", "掩码")}<input id="pg-mask" type="text" value="{escape(EXAMPLES[1])}"
spellcheck="false" autocapitalize="off" autocomplete="off" aria-describedby="pg-error"></label>
<pre id="pg-error" role="status" hidden></pre>
<div class="pg-chips">{chips}</div>
<div class="pg-fields">
<label class="pg-preset">{say("tile of a kernel", "内核的分块")}<select id="pg-preset"></select></label>{numbers}
<label>dtype<select id="pg-dtype">{dtypes}</select></label>
<label id="pg-which" hidden>{say("sequence drawn", "所画序列")}<select id="pg-b"></select></label>
</div>
<div class="pg-both"><div>
<div class="pg-axis">{say("keys →, queries ↓", "键 →，查询 ↓")}</div>
<canvas id="pg-canvas" role="img"></canvas>
<div class="pg-legend">{legend}</div><p id="pg-place" class="pg-note"></p>
</div><div>
<table id="pg-counts" class="pg-table"></table><dl id="pg-numbers"></dl>
<h2 id="traffic">{say("Predicted traffic", "预测的数据搬运量")}</h2>
<div id="pg-bars"></div><table id="pg-tensors" class="pg-table"></table>
</div></div>
<h2 id="python">{say("The same in Python", "同样的 Python")}</h2>
<pre class="pg-code"><code id="pg-python"></code></pre>
</div>
<script type="application/json" id="pg-presets">{data}</script>{scripts}"""
