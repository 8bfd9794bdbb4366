"""Every word of the page, in English and in Chinese. {names} are filled in by the page."""

from __future__ import annotations

LANGUAGES = ("en", "zh")

WORDS: dict[str, tuple[str, str]] = {
    # the page
    "title": ("Attention, seen through", "看透注意力"),
    "subtitle": (
        "What exact attention costs on {machine}: bytes, FLOPs, time and error, each computed or measured.",
        "精确注意力在 {machine} 上的代价：字节、运算、时间与误差，每个数字都由计算或实测得出。",
    ),
    "skip": ("Skip to the charts", "跳到图表"),
    "language": ("Language", "语言"),
    "theme": ("Theme", "外观"),
    "theme.auto": ("Auto", "跟随系统"),
    "theme.light": ("Light", "浅色"),
    "theme.dark": ("Dark", "深色"),
    "made": ("Made {date} with tilewise {version}, {software}.", "生成于 {date}，tilewise {version}，{software}。"),
    "footer": (
        "This file is complete: it needs no network. The controls switch between results that Python computed beforehand.",
        "本文件自成一体，无需联网。控件只是在 Python 预先算好的结果之间切换。",
    ),
    # controls
    "controls": ("Choose a problem", "选择问题"),
    "device": ("Machine", "机器"),
    "device.here": ("this machine: {name}", "本机：{name}"),
    "length": ("Sequence length", "序列长度"),
    "dim": ("Head dim", "头维度"),
    "mask": ("Mask", "掩码"),
    "tile": ("Tile", "分块"),
    "tile.plan": ("planned", "自动规划"),
    "schedule": ("Schedule", "调度"),
    "row": ("Row", "行"),
    "data": ("Data", "数据"),
    "mask.full": ("none", "无"),
    "mask.causal": ("causal", "因果"),
    "mask.window": ("causal, window of 1/8", "因果 + 1/8 滑窗"),
    "mask.prefix": ("causal or prefix of 1/4", "因果或 1/4 前缀"),
    "mask.documents": ("causal within 4 documents", "4 篇文档内因果"),
    "data.random": ("random scores", "随机分数"),
    "data.rising": ("rising scores: every tile rescales", "递增分数：每块都要重缩放"),
    "s.standard": ("standard", "标准实现"),
    "s.v1": ("v1: K/V outside", "v1：K/V 在外层"),
    "s.v2": ("v2: Q outside", "v2：Q 在外层"),
    "s.plan": ("chosen plan", "所选方案"),
    # the numbers on top
    "n.less": ("less memory traffic than standard", "标准实现的内存流量（以所选方案为 1）"),
    "n.skipped": ("of the tiles never touched", "的分块从未被触碰"),
    "n.time": ("predicted time", "预测时间"),
    "n.binding": ("takes longest", "是瓶颈"),
    # sections
    "machine.h": ("The machine and its ceilings", "机器与它的上限"),
    "machine.p": (
        "What could be measured here was measured, and the roof below is made of it. Every other figure has a source.",
        "能在本机测的都已实测，下面的屋顶线用的就是实测值；其余每个数字都有出处。",
    ),
    "machine.all": ("All figures of {name}, with their sources", "{name} 的全部指标与出处"),
    "figure": ("Figure", "指标"),
    "value": ("Value", "数值"),
    "source": ("Source", "出处"),
    "measured": ("measured", "实测"),
    "f.units": ("Units (SMs or cores)", "计算单元（SM 或核）"),
    "f.clock_hz": ("Clock", "主频"),
    "f.sram_bytes": ("On-chip memory of a unit", "每单元片上存储"),
    "f.register_bytes": ("Registers of a unit", "每单元寄存器"),
    "f.l2_bytes": ("L2", "L2 缓存"),
    "f.l3_bytes": ("L3", "L3 缓存"),
    "f.dram_bytes": ("Memory", "内存"),
    "f.dram_bandwidth": ("Memory bandwidth", "内存带宽"),
    "f.l2_bandwidth": ("L2 bandwidth", "L2 带宽"),
    "f.exp_rate": ("Exponentials", "指数运算"),
    "f.peak": ("Peak, {dtype}", "峰值，{dtype}"),
    "f.gemm": ("Matrix product, {dtype}", "矩阵乘，{dtype}"),
    "f.copy": ("Copying", "拷贝"),
    "f.read": ("Reading", "读取"),
    "f.exp": ("Exponentials", "指数运算"),
    "roofline.h": ("Under the roof", "屋顶线之下"),
    "roofline.p": (
        "FLOPs for each byte of memory traffic against speed. Left of the ridge memory sets the pace, right of it arithmetic. "
        "Standard attention and the two schedules are drawn as if every tile came from memory; the chosen plan with what "
        "the shared cache keeps off it.",
        "横轴是每字节内存流量对应的运算量，纵轴是速度。拐点左侧由内存决定快慢，右侧由运算决定。标准实现与两种调度按“每块都来自内存”画出；"
        "所选方案则扣除了共享缓存挡下的流量。",
    ),
    "intensity": ("FLOP per byte", "每字节运算量（FLOP/B）"),
    "speed": ("useful FLOP/s", "有效 FLOP/s"),
    "roof": ("roof", "屋顶"),
    "roof.measured": ("measured roof", "实测屋顶"),
    "roof.datasheet": ("roof by its figures", "理论屋顶"),
    "traffic.h": ("Where the bytes go", "字节去了哪里"),
    "traffic.p": (
        "Bytes read and written, by tensor. Standard attention writes and reads N × N matrices; v1 carries its accumulators "
        "through memory; v2 reads K and V again for each block of queries, most of it from cache.",
        "按张量统计读写字节。标准实现要写入并读回 N × N 矩阵；v1 让累加器反复进出内存；"
        "v2 对每个 Q 块重读 K、V，其中大部分命中缓存。",
    ),
    "bytes": ("bytes", "字节"),
    "log": ("Logarithmic", "对数刻度"),
    "traffic.compulsory": ("each tensor once", "每个张量一次"),
    "traffic.shares": ("By tensor", "按张量"),
    "traffic.read": ("read", "读"),
    "traffic.written": ("written", "写"),
    "traffic.measured": ("Measured by Nsight Compute", "Nsight Compute 实测"),
    "traffic.none": (
        "No measured traffic: `tilewise verify-traffic` makes a record on a GPU with Nsight Compute.",
        "暂无实测流量：在装有 Nsight Compute 的 GPU 上运行 `tilewise verify-traffic` 即可生成记录。",
    ),
    "problem": ("Problem", "问题"),
    "kernel": ("Kernel", "内核"),
    "predicted": ("Predicted", "预测"),
    "ratio": ("Measured / predicted", "实测 / 预测"),
    "where": ("Where", "位置"),
    "map.h": ("The tiles of the mask", "掩码的分块"),
    "map.p": (
        "Empty tiles are never loaded, full ones never masked; only the partial ones evaluate the mask. {visited} of {total} "
        "tiles are visited, {partial} of them partial.",
        "空块从不加载，满块无需掩码，只有部分块才逐元素判断。共 {total} 块，访问 {visited} 块，其中 {partial} 块为部分块。",
    ),
    "empty": ("empty", "空"),
    "partial": ("partial", "部分"),
    "full": ("full", "满"),
    "keys": ("key tiles", "键分块"),
    "queries": ("query tiles", "查询分块"),
    "walk.h": ("A walk over the tiles", "逐块行走"),
    "walk.p": (
        "96 tokens in tiles of 16 × 16. Follow one row: each tile may raise its maximum m; then everything gathered so far is "
        "rescaled by α = exp(m_old − m_new), and the tile's part is added. One division at the end gives the exact output.",
        "96 个 token，分块 16 × 16。跟随某一行：每个分块都可能抬高该行最大值 m，此时已累积的部分要乘以 α = exp(m_旧 − m_新)，"
        "再加上本块的贡献。最后除一次，即得精确输出。",
    ),
    "play": ("Play", "播放"),
    "pause": ("Pause", "暂停"),
    "previous": ("Previous step", "上一步"),
    "next": ("Next step", "下一步"),
    "step": ("Step {step} of {steps}", "第 {step} 步，共 {steps} 步"),
    "walk.moved": ("{bytes} moved so far, {total} in all", "已搬运 {bytes}，总计 {total}"),
    "walk.before": ("Row {row} has not met a key yet.", "第 {row} 行还没有遇到任何键。"),
    "walk.none": ("Row {row} sees no key of this tile.", "第 {row} 行在本块内看不到任何键。"),
    "walk.waits": (
        "Row {row} is not in this tile; its state waits {where}.",
        "第 {row} 行不在本块内，其状态保存在{where}。",
    ),
    "walk.memory": ("in memory", "内存中"),
    "walk.registers": ("on chip", "片上"),
    "walk.done": ("Row {row} is done: its output has been written.", "第 {row} 行已完成，输出已写回。"),
    "walk.grew": ("The maximum grew: rescale.", "最大值增大：需要重缩放。"),
    "walk.kept": ("The maximum stands: α = 1.", "最大值不变：α = 1。"),
    "walk.first": ("The first tile of this row.", "该行的第一块。"),
    "walk.scores": ("Scores of the row in this tile", "该行在本块内的分数"),
    "timeline.h": ("Loading while computing", "边加载边计算"),
    "timeline.p": (
        "One block of queries over eight key tiles. With one buffer it waits for every load; with two, the next tile arrives "
        "while the last is worked on. {gain}",
        "一个 Q 块依次处理八个键分块。只有一个缓冲区时每次都要等待加载；有两个时，下一块在计算上一块时到达。{gain}",
    ),
    "timeline.gain": (
        "Two buffers take {share} of the time of one.",
        "双缓冲用时为单缓冲的 {share}。",
    ),
    "buffers": ("{n} buffers", "{n} 个缓冲区"),
    "buffer1": ("1 buffer", "1 个缓冲区"),
    "load": ("load", "加载"),
    "compute": ("compute", "计算"),
    "memory.h": ("Memory against length", "内存与序列长度"),
    "memory.p": (
        "What one head keeps in memory beside its inputs and output. Standard attention keeps S and P and grows with the square; "
        "v1 keeps accumulators, v2 one number a row.",
        "单个头除输入输出外需要保留的内存。标准实现保存 S 和 P，按平方增长；v1 保存累加器，v2 每行只存一个数。",
    ),
    "memory.io": ("Q, K, V and O", "Q、K、V 与 O"),
    "tokens": ("tokens", "token 数"),
    "precision.h": ("What rescaling costs in precision", "重缩放对精度的影响"),
    "precision.p": (
        "The same attention with ever wider key tiles, so with ever fewer rescalings, for each way of accumulating; 1,024 keys. "
        "Error against float64 on the same quantised inputs. Dotted: the maxima known in advance, so that nothing is "
        "ever rescaled.",
        "同一个注意力，键分块越宽，重缩放次数越少；逐一比较各种累加方式，共 1024 个键。误差以相同量化输入下的 float64 为准。"
        "虚线：事先知道最大值，从不重缩放。",
    ),
    "width": ("keys in a tile", "每块键数"),
    "error": ("relative error", "相对误差"),
    "bench.h": ("Benchmarks, with their spread", "基准测试及其离散程度"),
    "bench.p": (
        "Median times, with the twentieth and eightieth percentile as whiskers. A contender with a wrong result has no speed.",
        "点为中位数，须线为第 20 与第 80 百分位。结果错误者不计速度。",
    ),
    "bench.none": (
        "No records here yet: `tilewise bench --save DIR` makes some, `tilewise report --records DIR` shows them.",
        "暂无记录：`tilewise bench --save DIR` 可生成，`tilewise report --records DIR` 可展示。",
    ),
    "record": ("Record", "记录"),
    "time": ("time", "时间"),
    "certificate.h": ("A run on this machine, certified", "本机的一次运行及其证书"),
    "certificate.p": (
        "{call} over {tokens} tokens and {heads} heads, by the {backend} backend.",
        "{call}，{tokens} 个 token、{heads} 个头，由 {backend} 后端执行。",
    ),
    "c.ok": ("Certified", "已认证"),
    "c.bad": ("Not certified", "未通过认证"),
    "c.rows": (
        "{checked} of {rows} rows, chosen at random, were recomputed in float64. The worst element uses {used} of its "
        "error bound.",
        "从 {rows} 行中随机抽取 {checked} 行，用 float64 重新计算。最差的元素用掉了误差界的 {used}。",
    ),
    "c.detection": (
        "One wrong row anywhere is noticed with probability {one}; {many} or more with 99%.",
        "任意一行出错，被发现的概率为 {one}；{many} 行及以上出错，被发现的概率为 99%。",
    ),
    "c.screen": (
        "All {elements} elements are finite and no larger than a mean of the values can be.",
        "全部 {elements} 个元素均为有限值，且不超过 V 的加权平均所能达到的范围。",
    ),
    "c.stray": (
        "{stray} elements are not finite, or larger than any mean of the values can be.",
        "{stray} 个元素非有限，或超过了 V 的加权平均所能达到的范围。",
    ),
    "c.worst": ("Rows that use most of their bound", "最接近误差界的行"),
    "c.where": ("head, row", "头，行"),
    "c.value": ("value", "值"),
    "c.exact": ("exactly", "精确值"),
    "c.bound": ("bound", "误差界"),
    "c.used": ("used", "占用"),
    "losses": ("Where its time went", "时间花在哪里"),
    "losses.p": ("{time} measured, {share} of what the roof allows.", "实测 {time}，达到屋顶线的 {share}。"),
    "l.ideal": ("the roof allows", "屋顶线所需"),
    "l.launch": ("launch", "启动"),
    "l.masked and padded scores": ("masked and padded scores", "被掩去或补齐的分数"),
    "l.exp unit": ("exponentials", "指数运算"),
    "l.traffic": ("traffic", "内存流量"),
    "l.tail wave": ("tail wave", "尾波"),
    "l.kernel": ("the kernel's own", "内核自身"),
    "backends": ("Backends, and why", "各后端及理由"),
    "chosen": ("chosen", "已选用"),
    "why": ("Why this plan", "为何选此方案"),
    "english": ("in the planner's words", "规划器原文"),
    # resources that can bind
    "r.tensor cores": ("tensor cores", "张量核心"),
    "r.shared memory": ("shared memory", "共享内存"),
    "r.exponentials": ("exponentials", "指数运算"),
    "r.fp32 units": ("fp32 units", "fp32 单元"),
    "r.L2 bandwidth": ("L2 bandwidth", "L2 带宽"),
    "r.DRAM bandwidth": ("memory bandwidth", "内存带宽"),
    "r.FMA units": ("FMA units", "FMA 单元"),
    "r.latency": ("latency", "延迟"),
}


def table(language: str) -> dict[str, str]:
    """The words of one language."""
    side = LANGUAGES.index(language)
    return {key: pair[side] for key, pair in WORDS.items()}
