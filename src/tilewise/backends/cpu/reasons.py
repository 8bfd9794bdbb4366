"""Why a call runs with the tile it runs with, in sentences."""

from __future__ import annotations

from tilewise.backends.cpu import frames
from tilewise.backends.cpu.frames import Tiles
from tilewise.backends.cpu.spec import BYTE_COLUMNS, Kernel
from tilewise.hardware.spec import DeviceSpec, KiB
from tilewise.model.cpu import register_tile
from tilewise.problem import Problem


def reasons_for(problem: Problem, kernel: Kernel, spec: DeviceSpec, tiles: Tiles, yours: bool) -> tuple[str, ...]:
    """Register tile, keys, rows, splits and memory of the blocks `tiles`; `yours` if their size was asked for."""
    register = _decode_register(problem, kernel) if kernel.kind == "decode" else _register(problem, kernel, spec)
    size = (f"{tiles.rows} × {tiles.keys}: yours",) if yours else (_keys(problem, kernel, tiles), _rows(problem, kernel, tiles))
    frame = frames.frame(problem, kernel, tiles)
    memory = f"a thread's frame takes {frame / KiB:.0f} of {frames.ROOM // KiB} KiB"
    return (register, *size, *_splits(tiles), memory, *_stash(problem, kernel, tiles))


def _register(problem: Problem, kernel: Kernel, spec: DeviceSpec) -> str:
    tile = kernel.tile
    sides = f"register tile {tile.rows} rows × {tile.keys} keys"
    if kernel.matrix:
        return f"{sides}: two by two tiles of the matrix unit, so that each operand is used twice"
    size = 8 if kernel.real == "float64" else 4
    dim = max(problem.head_dim, problem.head_dim_v) if kernel.kind in ("forward", "jvp") else 0
    usual, why = register_tile(spec, size, dim)
    if (usual.row_vectors, usual.keys) == (tile.vectors, tile.keys) and spec.lanes(size) == tile.lanes:
        return why
    if spec.lanes(size) != tile.lanes:
        return f"{sides}: kernels use NEON's instructions, which this processor has beside its own"
    return f"{sides}: no taller than the queries, so that no lanes are idle"


def _decode_register(problem: Problem, kernel: Kernel) -> str:
    tile = kernel.tile
    if kernel.matrix:
        how = "int8 keys as they lie and values by fours, multiplied as bytes on tiles of the matrix unit"
        return f"{tile.keys} query heads at once, K and V are read once: {how}"
    both = kernel.weighs_bytes and problem.head_dim_v % BYTE_COLUMNS == 0
    whole = "int8 keys and values" if both else "int8 keys"
    packed = "nothing is packed" + (f"; {whole} are multiplied as bytes" if kernel.bytes else "")
    if tile.keys == 1:
        return f"one query head a key head: K and V pass as two streams, {tile.lanes} lanes along the head dim, {packed}"
    return f"{tile.keys} query heads at once, {tile.lanes} lanes along the head dim: K and V are read once, {packed}"


def _keys(problem: Problem, kernel: Kernel, tiles: Tiles) -> str:
    keys, size = tiles.keys, 8 if kernel.real == "float64" else 4
    if kernel.kind == "decode" and kernel.tile.keys == 1:
        return f"{keys} keys: a block's sums are complete before they join the others"
    if kernel.kind == "decode":
        size = problem.kv_itemsize
        return f"{keys} keys: K and V take {keys * _pair(problem) * size / KiB:.0f} KiB of L1, and the next block is on its way"
    packed = 2 if kernel.matrix else size
    near = f"K and V, packed once a task, take {keys * _pair(problem) * packed / KiB:.0f} KiB"
    if keys >= problem.seqlen_k:
        return f"{keys} keys: all there are, in whole register tiles; {near}"
    return f"{keys} keys: joining the sums of a block costs {1 / keys:.1%} of the multiplications; {near}"


def _rows(problem: Problem, kernel: Kernel, tiles: Tiles) -> str:
    tasks = f"{tiles.tasks} task{'s' * (tiles.tasks != 1)} for {tiles.threads} thread{'s' * (tiles.threads != 1)}"
    if kernel.kind == "decode":
        near = "whose rows lie side by side" if problem.interleaved else "which share small pages"
        beside = f" for each of {tiles.groups} key heads, {near}" if tiles.groups > 1 else ""
        return f"1 row of {tiles.heads} head{'s' * (tiles.heads != 1)}{beside}: {tasks}"
    shared = f"{tiles.heads} heads × {tiles.rows}" if tiles.heads > 1 else f"{tiles.rows}"
    return f"{shared} rows share a packed block of K and V: {tasks}"


def _splits(tiles: Tiles) -> tuple[str, ...]:
    if tiles.splits == 1:
        return ()
    return (f"{tiles.splits} splits of the keys, so that every thread has work; the last to finish merges them in the kernel",)


def _stash(problem: Problem, kernel: Kernel, tiles: Tiles) -> tuple[str, ...]:
    if kernel.kind != "double_backward":
        return ()
    size = frames.stash(problem, kernel, tiles) * (8 if kernel.real == "float64" else 4)
    if size:
        return (f"products of the rows and all keys are kept in {size / KiB:.0f} of {frames.STASH // KiB} KiB a thread",)
    return (f"products of the rows and all keys take more than {frames.STASH // KiB} KiB a thread, and are computed twice",)


def _pair(problem: Problem) -> int:
    return problem.head_dim + problem.head_dim_v
