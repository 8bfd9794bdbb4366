"""The Chinese of sentences that other parts of the library write: none is missing, and nothing English is left in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.lab.test_report import TEXTS
from tilewise import hardware
from tilewise.diagnostics.plan import plan
from tilewise.errors import PlanError
from tilewise.hardware.catalogue import catalogue
from tilewise.hardware.host import Host, cpu_spec
from tilewise.lab.bench.cases import DATA
from tilewise.lab.bench.peers import PEERS
from tilewise.lab.bench.suites import SUITES, suite
from tilewise.lab.report import chinese, figures, page
from tilewise.lab.report.machine import FIGURES

PHRASES = tomllib.loads((Path(page.__file__).parent / "phrases.toml").read_text(encoding="utf-8"))["phrases"]
NAMES = """
a100 acc alibi amd amx apple arm aten attention attn avx avx512 b200 bench bf16 bfloat16 bshd causal clk compute cpu
cpuinfo cuda cudnn ddr4 ddr5 device devices dir dram dropout dtype e4m3fn efficient env epyc ex2 exp exp2 fa4 flash
flex float16 float32 float64 float8 flop fma fmas forward fp16 fp32 geforce get gflop ghz gib gpu h100 h200 hardware
hbm head hopper instinct int int8 intel interpret kernel kernel32 keys kflop kib l40s lse mask max measure mflop mhz
mib min neon neoverse nsight num nvidia out pcie pflop postprocess prepare preprocess proc processor properties python
queries records reference remeasure report rowmax rowsum rtx save sdpa simd sinks softcap softmax split sram swizzle
sxm sys sysctl system t tail tf32 tflop threads tib tiled tilewise tma token tokens torch traffic triton ulysses
upcast utc v100 varlen verify warp warpgroup warps wave xeon xformers
"""
"""Names of things and of code: they are the same in every language."""


def english_in(text: str) -> list[str]:
    """Words that a reader of Chinese would have to translate; titles in 《》 and `code` are names."""
    rest = re.sub(r"《[^》]*》|`[^`]*`|\bhardware\.measure\('cpu'\)|tw\.\w+\([^。，]*\)|https?\S+", "", text)
    words = re.findall(r"[A-Za-z][A-Za-z0-9]*", rest)
    return [word for word in words if len(word) > 2 and word.lower() not in NAMES.split() and not word.isupper()]


def test_english_is_told_from_names() -> None:
    assert english_in("用两个 warpgroup，寄存器 fp32") == []
    assert english_in("见《CUDA C++ Programming Guide》与 `tilewise env`") == []
    assert english_in("把 memory 加载到 SM") == ["memory"]
    assert english_in("one buffer") == ["one", "buffer"]


def test_the_tables_hold_no_english_among_the_chinese() -> None:
    for key, (_, text) in TEXTS.items():
        assert not english_in(re.sub(r"\{\w+\}", "", text)), key
    for english, text in PHRASES:
        assert not english_in(re.sub(r"\{\w+\}", "", text)), english
        assert set(re.findall(r"\{(\w+)\}", english)) == set(re.findall(r"\{(\w+)\}", text)), english


def test_a_silent_machine_is_described_in_chinese_too() -> None:
    """One that tells neither its clock nor its caches: each figure is an estimate."""
    spec = cpu_spec(Host(cores=0))
    sources = [spec.sources[name] for name in FIGURES if spec.sources.get(name)]
    assert sum(source.startswith("estimate") for source in sources) > 3
    for source in sources:
        told = chinese.translate(source)
        assert told and not english_in(told), source


def test_every_sentence_of_the_page_has_its_chinese(data: dict[str, Any]) -> None:
    for text in chinese.sentences(data):
        told = chinese.translate(text) if text else "无"
        assert told, f"no Chinese for: {text}"
        assert not english_in(told), f"{text} → {told}"
        assert not text or data["phrases"][text] == told


@pytest.mark.parametrize("name", sorted(SUITES))
def test_every_suite_is_told_in_chinese(name: str) -> None:
    """A record of any suite may lie in the reader's folder: its name, its cases, who was measured."""
    words = {name, f"sweep {name}", *PEERS, *DATA}
    for case in suite(name).cases:
        words |= {case.words(), *case.rivals}
    for text in words:
        assert not english_in(chinese.case_words(text)), f"{text} → {chinese.case_words(text)}"


def test_phrases_of_several_words_are_found_within_a_case() -> None:
    told = chinese.case_words("4×32/8×1→4096×128 bfloat16 causal cache pages of 16 append and rotary fwd")
    assert told == "4×32/8×1→4096×128 bfloat16 因果 KV 缓存 每页 16 个 追加与旋转 前向"
    assert chinese.case_words("1×16×2048×128 bfloat16 causal & window(128) forward tile 64×128 bwd") == (
        "1×16×2048×128 bfloat16 因果 + 128 滑窗 前向 分块 64×128 反向"
    )


@pytest.mark.parametrize("key", sorted(catalogue()))
def test_sources_and_reasons_of_other_machines(key: str) -> None:
    """The page of a reader who has another machine."""
    spec = hardware.device(key)
    texts = [spec.sources[name] for name in (*FIGURES, "peak") if spec.sources.get(name)]
    dtype = figures.dtype_on(spec) if key != "v100" else "float16"
    for length, dim, mask in ((512, 64, "causal"), (4096, 128, "full"), (1024, 128, "window")):
        for tile in figures.TILES[:2]:
            try:
                texts += plan(figures.problem_of(length, dim, mask, dtype), spec, tile=tile).reasons
            except PlanError as error:
                texts.append(str(error))
    for text in texts:
        told = chinese.translate(text)
        assert told, f"no Chinese for: {text}"
        assert not english_in(told), f"{text} → {told}"


def test_what_fills_a_gap_is_translated_too() -> None:
    told = chinese.translate(
        "64×256 with 2 buffers and 8 warps is predicted 11.4% faster, but it crowds the registers, which may spill within the "
        "loop and it leaves few blocks to balance the device and its warps share rows"
    )
    assert told and told.split("，") == [
        "64×256（2 个缓冲区", "8 个 warp）预测快 11.4%", "但它使寄存器过满", "循环内可能溢出", "它留下的线程块太少", 
        "难以均衡设备", "它的 warp 共用行",
    ]  # fmt: skip
    assert chinese.case_words("1×8×1024×64 float32 causal fwd+bwd") == "1×8×1024×64 float32 因果 前向+反向"
    assert chinese.translate("nobody has written this down") is None
