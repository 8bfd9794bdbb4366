"""Block sizes: rows and keys of a task's blocks, splits of the keys, and the threads that share them."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.cpu.frames import Tiles, fits, fitting, grain, stash_rows
from tilewise.backends.cpu.spec import Kernel, round_up
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.cpu import key_block, threads_for, whole_key_block
from tilewise.problem import Problem

TASK_ROWS = ((2 << 20, 768), (1 << 20, 512), (0, 256))
"""(bytes of L2, rows): rows of all heads of a group in one task, in whole strips, where L2 has at least so many bytes. K and V
are packed once for all of them; Q and O should fit beside K and V. (Xeon, 2 MiB, head dim 128, 4096 keys: 768 rows 5 % faster
than 528. The last entry was not measured.)"""
FEW_TASK_ROWS = 512
MANY_TASKS = 12
"""More rows than that only where every thread has so many tasks all the same: threads should end together."""

TASKS_EACH = 4
"""Tasks that each thread should have before rows are left as they are."""

MATRIX_KEYS = {"forward": 256, "backward": 128}
"""Keys of a block on matrix tiles: products are so short that what is done once a block counts."""
MATRIX_TALL = 512
"""Rows of a block in the backward there, if that many fit into a thread's buffer."""
STREAM_KEYS = 256
"""Keys whose sums are complete before they join those of the others, when one row is decoded."""
TOGETHER_KEYS = 64
"""Keys of a block where a task decodes all heads, of one row a head: so few that the memory of a token is still near when the
next head reads on. (Neoverse N1, 8 key heads of 128, fp32, 4096 keys: head after head 33.6 ms, together 17.3.)"""
MOST_TOGETHER = 32
"""The same of several rows a head: as many, up to that, as leave room in L1. K of one head takes a sixteenth of it; K and V of
all heads fill it, or half of it where few rows share them and memory is waited for. (Neoverse N1, 8 key heads of 128, processor
time for 2 sequences of 16,384 tokens, ms in (B, S, H, D) and in pages of 16 at random:
two rows, fp32, 8 keys 22.1 and 22.9, 16 keys 28.9 and 29.7; bf16, 8 keys 18.5 and 19.0, 16 keys 18.6 and 21.0;
four rows, fp32, 8 keys 28.4 and 29.3, 16 keys 34.4 and 35.2; bf16, 8 keys 28.6 and 29.1, 16 keys 26.8 and 28.0.
int8 in pages in order and at random: two rows, 16 keys 19.2 and 20.5, 32 keys 16.8 and 19.0, 64 keys 17.3 and 19.7.)"""
PAGED_KEYS = 16
"""The same where each head has its tokens side by side in a small page. (Neoverse N1, pages of 16 at random, 2 sequences of
16,384 tokens; 8, 16 and 32 keys, ms: two rows, fp32 22.6, 23.3 and 25.1, bf16 19.2, 18.7 and 17.7; four rows, fp32 29.3, 24.8
and 27.9, bf16 29.3, 26.8 and 26.4.)"""
BYTE_KEYS = 64
"""The same where AVX-512 multiplies bytes, however they lie: a key takes so few instructions that what is done once a block
counts. (Cascade Lake, 8 key heads of 128, 2 sequences of 8,192 tokens, int8 in pages of 16, ns a key of a head: two rows, 16 and
48 keys 47 and 42; 16 and 64 keys, four rows 61 and 53, eight rows 100 and 87.)"""
SPAN = 2048
"""Keys of a part in invariant calls, a multiple of every block: parts are merged one after the other, whoever computes them."""
BACKWARD_TALL = 256
BACKWARD_KEYS = 64
BACKWARD_TASKS = 32
"""Rows of a block in the backward, if there are at least so many of them for the threads to share; else half. And its keys."""


def planned(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> Tiles:
    """The blocks of a call whose longest sequence has so many queries."""
    if kernel.kind == "decode":
        return _decode(problem, kernel, spec)
    if kernel.invariant:
        return _invariant(problem, kernel, spec, longest)
    if kernel.kind in ("forward", "jvp"):
        return _forward(problem, kernel, spec, longest)
    return (_matrix_backward if kernel.matrix else _backward)(problem, kernel, spec, longest)


def given(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int, size: tuple[int, int]) -> Tiles | None:
    """Blocks of that size, as many heads in a task and as many splits as there is room for; None if there is room for none."""
    rows, keys = size
    threads, blocks = threads_for(problem, spec), -(-longest // rows)
    group = 1 if kernel.backwards else problem.group
    for heads in (n for n in range(group, 0, -1) if group % n == 0):
        tasks = problem.batch * problem.heads // heads * blocks
        splits = _splits_of(problem, kernel, spec, tasks, keys)
        for count in sorted({splits, 1}, reverse=True):
            tiles = assigned(problem, (heads, rows, keys), blocks, count, threads)
            if fits(problem, kernel, tiles):
                return tiles
    return None


def assigned(
    problem: Problem, shape: tuple[int, int, int], blocks: int, splits: int, threads: int, groups: int = 1
) -> Tiles:
    """Blocks of `shape` (heads, rows, keys) as tasks for threads."""
    heads, rows, keys = shape
    tasks = problem.batch * problem.heads // (heads * groups) * blocks * splits
    return Tiles(rows, keys, blocks, splits, tasks, min(threads, tasks), heads, groups)


def _forward(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> Tiles:
    """Blocks large enough to pay for packing K and V, small enough that every thread has work."""
    R, J, threads = kernel.tile.rows, kernel.tile.keys, threads_for(problem, spec)
    usual = round_up(key_block(problem, spec), J)
    keys = round_up(min(MATRIX_KEYS["forward"], max(1, problem.seqlen_k)), J) if kernel.matrix else usual
    rows, most = _task_rows(problem, kernel, spec, longest)

    def arrange(heads: int, rows: int, keys: int) -> Tiles:
        pairs = problem.batch * problem.heads // heads
        while rows > R and threads > 1 and pairs * -(-longest // rows) < TASKS_EACH * threads:
            rows = round_up(rows // 2, R)
        blocks = -(-longest // rows)
        splits = _splits_of(problem, kernel, spec, pairs * blocks, keys)
        return assigned(problem, (heads, rows, keys), blocks, splits, threads)

    return fitting(problem, kernel, arrange, (problem.group, rows, keys), most)


def _task_rows(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> tuple[int, int]:
    """Rows of each head of a task, and the most that a head can use."""
    R, threads = kernel.tile.rows, threads_for(problem, spec)
    together = next(rows for size, rows in TASK_ROWS if spec.l2_bytes >= size)
    if problem.batch * problem.heads * longest < MANY_TASKS * threads * together:
        together = min(together, FEW_TASK_ROWS)
    most = max(R, round_up(min(together, longest), R))
    blocks = -(-longest // max(R, (together + R - 1) // problem.group // R * R))
    return max(R, round_up(-(-longest // max(1, blocks)), R)), most  # of one length, or nearly


def _invariant(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> Tiles:
    """Blocks of as many keys whatever the rows and the threads are; the rest may follow from them, since no sum does."""
    R, group, threads = kernel.tile.rows, problem.group, threads_for(problem, spec)
    keys = whole_key_block(problem, spec)
    rows, _ = _task_rows(problem, kernel, spec, longest)
    shapes = [(part, n) for part in range(1, group + 1) if group % part == 0 for n in range(R, rows + 1, R)]
    shapes.sort(key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)
    for heads, rows in shapes:
        blocks = -(-longest // rows)
        tasks = problem.batch * problem.heads // heads * blocks
        parts = -(-problem.seqlen_k // SPAN) if tasks < TASKS_EACH * threads and threads > 1 else 1
        for splits in sorted({max(1, parts), 1}, reverse=True):
            tiles = assigned(problem, (heads, rows, keys), blocks, splits, threads)
            if fits(problem, kernel, tiles):
                return tiles
    raise AssertionError("one strip of one head always fits")


def _decode(problem: Problem, kernel: Kernel, spec: DeviceSpec) -> Tiles:
    """Key blocks that fill half of L1, for the next one is on its way; less where few rows use them and memory is waited for; but
    not too few. A single row only sums by blocks, and matrix tiles take as many keys as one product sums over."""
    pair, (_, step) = (problem.head_dim + problem.head_dim_v) * problem.kv_itemsize, grain(kernel)
    room = spec.l1d_bytes * (3 if problem.group <= problem.itemsize else 4) // 8
    keys = max(step, room // pair // step * step) if kernel.tile.keys > 1 else STREAM_KEYS
    if kernel.matrix:
        keys = step
    elif kernel.together:
        keys = min(keys, round_up(_together_keys(problem, kernel, spec), step))
    threads = threads_for(problem, spec)

    def arrange(heads: int, rows: int, keys: int, groups: int = 1) -> Tiles:
        splits = _splits_of(problem, kernel, spec, problem.batch * problem.heads // (heads * groups), keys)
        return assigned(problem, (heads, rows, keys), 1, splits, threads, groups)

    if kernel.together:
        counts = (n for n in range(problem.kv_heads, 1, -1) if problem.kv_heads % n == 0)
        together = (arrange(problem.group, 1, keys, groups) for groups in counts)
        if tiles := next((tiles for tiles in together if fits(problem, kernel, tiles)), None):
            return tiles
        kernel = kernel._replace(together=False)
    return fitting(problem, kernel, arrange, (problem.group, 1, keys), 1)


def _together_keys(problem: Problem, kernel: Kernel, spec: DeviceSpec) -> int:
    if kernel.tile.keys == 1:
        return TOGETHER_KEYS
    if kernel.bytes and spec.isa == "avx512":
        return BYTE_KEYS
    if not problem.interleaved:
        return PAGED_KEYS
    size = problem.kv_itemsize
    token = problem.kv_heads * (problem.head_dim + problem.head_dim_v) * size
    room = spec.l1d_bytes // (2 if problem.group <= size else 1)
    return max(1, min(MOST_TOGETHER, room // token, spec.l1d_bytes // 16 // (problem.head_dim * size)))


def _backward(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> Tiles:
    R = kernel.tile.rows
    keys = round_up(min(key_block(problem, spec), BACKWARD_KEYS), kernel.tile.keys)
    # tall blocks pay for packing K and V; the choice must not depend on the threads, or the order of sums would
    tall = problem.batch * problem.heads * (longest // BACKWARD_TALL) >= BACKWARD_TASKS
    rows = max(R, round_up(min(BACKWARD_TALL if tall else BACKWARD_TALL // 2, longest), R))
    rows = stash_rows(problem, kernel, rows, keys)
    return fitting(problem, kernel, _by_heads(problem, spec, longest), (1, rows, keys), rows)


def _matrix_backward(problem: Problem, kernel: Kernel, spec: DeviceSpec, longest: int) -> Tiles:
    """Every block of rows packs all of K and V and adds to all of dK and dV: it is as tall as memory and the number of tasks
    allow. Here too the choice must not depend on the threads."""
    R = kernel.tile.rows
    keys = round_up(min(MATRIX_KEYS["backward"], max(1, problem.seqlen_k)), kernel.tile.keys)
    arrange = _by_heads(problem, spec, longest)
    rows = min(MATRIX_TALL, round_up(max(1, longest), R))
    while rows > R and not fits(problem, kernel, arrange(1, rows, keys)):
        rows -= R
    while rows > BACKWARD_TALL // 2 and problem.batch * problem.heads * (longest // rows) < BACKWARD_TASKS:
        rows = round_up(rows // 2, R)
    return fitting(problem, kernel, arrange, (1, rows, keys), rows)


def _by_heads(problem: Problem, spec: DeviceSpec, longest: int) -> Callable[[int, int, int], Tiles]:
    """In the backward a task has one query head."""
    threads = threads_for(problem, spec)
    return lambda heads, rows, keys: assigned(problem, (heads, rows, keys), -(-longest // rows), 1, threads)


def _splits_of(problem: Problem, kernel: Kernel, spec: DeviceSpec, tasks: int, keys: int) -> int:
    """Parts of the keys, so that every one of several threads has some tasks; each of several blocks."""
    threads = threads_for(problem, spec)
    if problem.splits:
        return max(1, min(problem.splits, -(-problem.seqlen_k // keys)))
    if threads == 1 or kernel.kind not in ("forward", "decode"):
        return 1
    if kernel.kind == "decode":
        each, least_keys = 4, 4 * keys
    else:
        each, least_keys = 2, 2 * min(keys, round_up(key_block(problem, spec), kernel.tile.keys))
    return max(1, min(-(-each * threads // tasks), problem.seqlen_k // least_keys))
