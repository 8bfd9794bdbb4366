"""The five tutorials behind this package: their sections, and each figure of theirs with the page whose code prints it.

The tutorials themselves are not part of the repository, so the list is. A figure is (what it is, page, text of the output of a
block that `tools.site.pages` runs). Where a tutorial is loose or wrong, the row has our value beside theirs.
"""

from __future__ import annotations

from typing import NamedTuple

TILING = "Tiling分块技术"
RESCALING = "Flash Attention 中的 Tile 大小和重标定机制详解"
MINIMAL = "Flash Attention 最小实现 - 架构说明"
IO_AWARE = "IO-Aware算法设计"
VERSION_1 = "通俗讲解 FlashAttention v1 的分块策略与 Online Softmax 应用"

SECTIONS: dict[str, tuple[str, ...]] = {
    TILING: (
        "为什么需要Tiling", "问题回顾", "Tiling的核心思想", "FlashAttention的分块策略", "Q、K、V的分块", "块大小的选择",
        "典型块大小", "外循环与内循环", "双层循环结构", "循环顺序的重要性", "数据流图", "分块计算的数学保证",
        "如何分块计算Softmax", "Online Softmax关键", "分块输出的正确性", "分块矩阵乘法示例", "经典分块矩阵乘法",
        "FlashAttention的分块特殊性", "SRAM利用优化", "双缓冲", "寄存器分配", "块大小与性能", "块大小的权衡", "最优块大小",
        "代码示例：分块Attention", "Python实现", "总结", "关键要点", "Tiling的优势", "关键术语", "延伸阅读",
    ),
    RESCALING: (
        "一、基本概念", "block_size_q 和 block_size_kv 的含义", "分块策略", "二、重标定机制", "什么是重标定",
        "为什么需要重标定", "重标定过程详解", "重标定示例", "三、Tile 大小设计的意义", "当前设计策略", "设计考虑因素",
        "根据 head_dim 调整", "四、重标定的数值误差", "误差来源", "误差累积示例", "优化策略", "五、总结", "Tile 大小的作用",
        "重标定的重要性", "设计原则",
    ),
    MINIMAL: (
        "整体架构", "算法流程", "高层流程", "详细执行流程", "内存层次", "全局内存", "共享内存", "寄存器", "计算分析",
        "FLOPs计算", "内存访问分析", "理论加速比", "关键优化技术", "Tiling", "在线Softmax", "Kernel融合", "共享内存优化",
        "性能特征", "计算vs内存bound", "可扩展性", "与完整实现的差异", "学习建议", "理解算法", "理解实现", "实验", "优化",
        "参考资料", "论文", "代码", "教程",
    ),
    IO_AWARE: (
        "什么是IO-Aware", "传统算法分析的局限", "IO-Aware的核心思想", "为什么现在更重要", "Roofline模型", "模型概述",
        "关键概念", "Roofline图", "两种绑定类型", "Attention是内存绑定的", "标准Attention的计算强度分析", "实际计算强度",
        "HBM访问成本分析", "标准Attention的HBM访问量", "多次扫描问题", "理想情况 vs 现实", "减少HBM访问的策略", "融合",
        "分块", "重计算", "FlashAttention的IO优化", "核心创新", "HBM访问量对比", "FlashAttention计算循环", "总结",
        "关键要点", "FlashAttention的关键洞察", "关键术语", "延伸阅读",
    ),
    VERSION_1: (
        "分块策略：把大问题拆成小块", "分块方式", "为什么这样分块", "Online Softmax 在 FlashAttention 中的应用",
        "代码中的分块与 Online Softmax", "分块体现", "Online Softmax 原理", "为什么高效", "小结", "复杂度分析",
        "传统注意力", "FlashAttention", "总结",
    ),
}


class Figure(NamedTuple):
    tutorial: str
    what: str
    page: str
    printed: str


FIGURES = (
    Figure(TILING, "S and P of 4,096 tokens", "three-kernels", "S 32 MiB, P 32 MiB, together 64 MiB"),
    Figure(
        TILING, "about 20 MB of SRAM; a kernel may use less", "three-kernels",
        "SRAM 20.25 MiB, as shared memory 17.3 MiB",
    ),
    Figure(
        TILING, "SRAM is about ten times as fast", "three-kernels",
        "9.5 times as fast as memory by the tutorial, 9.6",
    ),
    Figure(TILING, "Tr and Tc, ragged", "tiling-by-hand", "16 x 12: Tr 4, Tc 5, right: True"),
    Figure(TILING, "on-chip bytes, both forms", "choosing-tiles", "41216 bytes, or 32 KiB"),
    Figure(TILING, "block sizes to choose from", "choosing-tiles", "4096 tokens: [16, 32, 64, 128, 192, 256] rows"),
    Figure(TILING, "adapted to the sequence's length", "choosing-tiles", "64 tokens: [16, 32, 64] rows"),
    Figure(TILING, "usual tiles of an A100", "choosing-tiles", "a100 64 True\na100 128 True\na100 256 True"),
    Figure(TILING, "usual tiles of an H100", "choosing-tiles", "h100 64 True\nh100 128 True\nh100 256 True"),
    Figure(
        TILING, "larger tiles: fewer iterations, more SRAM", "choosing-tiles",
        "128 x 192: 32 passes of 22 updates, 112 KiB",
    ),
    Figure(TILING, "two buffers", "choosing-tiles", "1 buffers: 12.0\n2 buffers: 9.0"),
    Figure(
        TILING, "Q once, O once, K and V for each block of Q", "tiling-by-hand",
        "read {'Q': 128, 'K': 256, 'V': 256} written {'O': 128",
    ),
    Figure(TILING, "tiles of a matrix product", "three-principles", "tiles of  8:  65536 elements loaded, right: True"),
    Figure(RESCALING, "m 5 to 7", "softmax-from-pieces", "alpha 0.135, output 10 -> 1.35 + ..., sum 2 -> 0.27 + ..."),
    Figure(
        RESCALING, "updates of 1,024 keys", "softmax-from-pieces",
        "random   16 wide (64, 4)   32 wide (32, 3)   64 wide (16, 2)",
    ),
    Figure(
        RESCALING, "updates with a mask", "softmax-from-pieces",
        "causal(): 2 updates for the first 64 queries, 32 for the last",
    ),
    Figure(
        RESCALING, "starting tiles, fp32", "choosing-tiles",
        "fp32 starts with {64: '32 x 64', 96: '32 x 64', 128: '16 x 32'}",
    ),
    Figure(
        RESCALING, "starting tiles, half", "choosing-tiles",
        "half starts with {64: '16 x 32', 96: '8 x 32', 128: '8 x 16'}",
    ),
    Figure(
        RESCALING, "shared memory, d 64", "choosing-tiles",
        "32 x 64:  72.50 KiB, too large\nd  64  16 x 32:  32.25 KiB, fits",
    ),
    Figure(
        RESCALING, "shared memory, d 128", "choosing-tiles",
        "32 x 64: 128.50 KiB, too large\nd 128  16 x 32:  60.25 KiB, too",
    ),
    Figure(
        RESCALING, "shared memory, d 256", "choosing-tiles",
        "32 x 64: 240.50 KiB, too large\nd 256  16 x 32: 116.25 KiB, too",
    ),
    Figure(RESCALING, "erratum: 4 × 8 in fp32", "choosing-tiles", "fp32: (4, 8), 128 updates for 1024 keys"),
    Figure(RESCALING, "erratum: half keeps its tile", "choosing-tiles", "half: (16, 32), 32 updates for 1024 keys"),
    Figure(
        RESCALING, "erratum: the best tile that fits", "choosing-tiles",
        "the largest that fits: (8, 64), 42.1 KiB, 16 updates",
    ),
    Figure(
        RESCALING, "erratum: floats take more", "choosing-tiles",
        "a 16 x 32 tile at d 64: fp32 32.25 KiB, half 22.25 KiB",
    ),
    Figure(RESCALING, "ten rescalings of 1e-6", "precision", "the budget of the tutorial: 1e-05"),
    Figure(
        RESCALING, "rescaling costs where scores rise slowly", "precision",
        "more than three times the error without rescaling: True",
    ),
    Figure(RESCALING, "and nothing elsewhere", "precision", "random: 5 rescalings, no worse than never: True"),
    Figure(RESCALING, "double and Kahan", "precision", "True True True"),
    Figure(RESCALING, "FMA", "precision", "fused 0.97 of the error"),
    Figure(RESCALING, "tolerances: 1e-5 and 0.02", "precision", "torch.float32 True True\ntorch.bfloat16 True True"),
    Figure(MINIMAL, "six kernels against one", "three-principles", "six kernels    258.1 MiB"),
    Figure(
        MINIMAL, "both right forms, and the wrong one", "softmax-from-pieces",
        "with the factor    True\nwithout the factor 0.1",
    ),
    Figure(MINIMAL, "shared memory at 64 × 64 × 64", "choosing-tiles", "'S': '16 KiB', 'P': '16 KiB'} together 56 KiB"),
    Figure(MINIMAL, "FLOPs", "three-kernels", "4 S² D B H = 8.6 GFLOP; the model: 8.6"),
    Figure(MINIMAL, "FLOPs of the softmax", "three-kernels", "5 S² B H = 0.17 GFLOP, 2.0%"),
    Figure(MINIMAL, "intensity 2D and S", "three-kernels", "standard 128 = 2D, flash 1024 = S"),
    Figure(
        MINIMAL, "elements of standard attention", "three-principles",
        "printed S(3D + 2S) = 2293760; its list sums to S(4D + 2S) = 2359296",
    ),
    Figure(
        MINIMAL, "erratum: P counted as well", "three-principles",
        "with P written and read, too: 4456448; the model: 4456448",
    ),
    Figure(MINIMAL, "elements of flash", "three-principles", "flash 4SD = 262144; the model's least: 262144"),
    Figure(
        MINIMAL, "the ideal, and the erratum", "three-principles",
        "76 times = 4.75 S/D; with both at the memory's bandwidth 9 times",
    ),
    Figure(MINIMAL, "memory, S 512", "three-principles", "0.5 MiB against   128 KiB, 4 times; in fp16   256 KiB"),
    Figure(MINIMAL, "memory, S 1024", "three-principles", "2.0 MiB against   256 KiB, 8 times; in fp16   512 KiB"),
    Figure(MINIMAL, "memory, S 2048", "three-principles", "8.0 MiB against   512 KiB, 16 times"),
    Figure(MINIMAL, "memory, S 4096", "three-principles", "32.0 MiB against  1024 KiB, 32 times"),
    Figure(MINIMAL, "memory, S 8192", "three-principles", "128.0 MiB against  2048 KiB, 64 times"),
    Figure(
        MINIMAL, "latencies", "three-kernels",
        "shared memory: 23 clocks, 16 ns\nL2: 200 clocks, 142 ns\nmemory: 290 clocks, 206 ns",
    ),
    Figure(
        MINIMAL, "bank conflicts, padding, swizzling", "choosing-tiles",
        "column  plain     32-way\ncolumn  padded     1-way\ncolumn  swizzled   1-way",
    ),
    Figure(
        MINIMAL, "erratum: the same swap in every row", "choosing-tiles",
        "the same swap in every row 32\nXOR with the row 1",
    ),
    Figure(MINIMAL, "2 × 2 by hand", "tiling-by-hand", "row 0: O = [1.538 2.538]"),
    Figure(MINIMAL, "a causal mask added", "thirty-lines", "True 17 of 20 tiles"),
    Figure(IO_AWARE, "ridge points", "three-kernels", "A100 ridge 156.0\nH100 ridge 295.3"),
    Figure(IO_AWARE, "intensity by step", "three-kernels", "{'QK^T': 128, 'softmax': 2.5, 'PV': 128}"),
    Figure(
        IO_AWARE, "intensity in all; erratum: in bytes", "three-kernels",
        "together 65.25 for each element, 32.6 for each byte of fp16",
    ),
    Figure(IO_AWARE, "erratum: not half of the peak", "three-kernels", "standard attention reaches 21% of an A100"),
    Figure(
        IO_AWARE, "accesses of standard attention", "three-principles",
        "printed 4N² + 6Nd = 68681728; its list sums to 4N² + 5Nd = 68419584",
    ),
    Figure(IO_AWARE, "25 times", "three-principles", "M 25600 elements: 256 MiB against 10.24 MiB, 25 times less"),
    Figure(IO_AWARE, "erratum: the lost square", "three-principles", "with the square lost: 0.16 MiB"),
    Figure(
        IO_AWARE, "the exact count of a schedule", "three-principles",
        "128 rows: 3.95 times less\nQ outside, 256 rows: 7.68 times less",
    ),
    Figure(
        IO_AWARE, "what the forward keeps", "three-principles",
        "the forward keeps {'O': '512 KiB', 'LSE': '16 KiB'}",
    ),
    Figure(IO_AWARE, "erratum: the trend of hardware", "three-kernels", "compute x18, bandwidth x8.9"),
    Figure(VERSION_1, "blocks of 1,024 tokens", "v1-v2", "4 blocks of Q, 8 blocks of K/V, 32 tiles of 256 x 128"),
    Figure(VERSION_1, "both loop orders are right", "v1-v2", "[True, True]"),
    Figure(VERSION_1, "what v1 moves", "v1-v2", "v1 29.5 tensors in all"),
    Figure(VERSION_1, "what v2 moves", "v1-v2", "v2 18.0 tensors in all"),
    Figure(
        VERSION_1, "4·Br·d + 8·Bc·d, and what it leaves out", "v1-v2",
        "128 KiB for Q, K and V, 194 KiB for S, O, m and l",
    ),
    Figure(
        VERSION_1, "time and memory with N", "v1-v2",
        "time: x4\ntwice the tokens, on chip: x1\ntwice the tokens, extra memory: x2",
    ),
    Figure(VERSION_1, "erratum: PV is O(N²d)", "v1-v2", "PV / softmax = 25.6"),
    Figure(VERSION_1, "erratum: SRAM is not a few MB", "v1-v2", "163 KiB, 17 MiB"),
)
