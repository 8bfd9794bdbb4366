"""What the CPU kernels run for a problem on a processor: which kernel, its tile, and why. Needs neither torch nor llvmlite.

A pass has one kernel: `forward`, `decode` (one query a head) or `backward` (dQ, dK and dV together). Where keys are split,
the last split to finish merges them inside the kernel: there is no kernel for that.
"""

from __future__ import annotations

from tilewise.backends.cpu import blocks, frames
from tilewise.backends.cpu.frames import Tiles, grain
from tilewise.backends.cpu.reasons import reasons_for
from tilewise.backends.cpu.spec import (
    ACCUMULATORS,
    ARGUMENTS,
    BACKWARD,
    BYTE_COLUMNS,
    MOST_BYTE_COLUMNS,
    TILE_KEYS,
    Kernel,
    Register,
    mask_args,
)  # fmt: skip
from tilewise.backends.verdict import Verdict, cpu_only
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.masks.program import is_interval
from tilewise.model.cpu import register_tile, short_tile, threads_for
from tilewise.model.grid import even
from tilewise.model.tile import TilePlan, refusal
from tilewise.problem import Problem

ARCHITECTURES = ("aarch64", "x86_64")
INVARIANT = True
"""Serves `Problem.invariant`."""
KINDS = ("forward", "decode", "backward", "jvp", "double_backward", "sweep")
DERIVED = ("jvp", "double_backward")
MATRIX_KINDS = ("forward", "backward")
"""Kernels that are made for matrix tiles too."""
MATRIX_SIDE = 32
"""Rows and keys of their register tile: two by two tiles of 16."""
SMALL_PAGE = 16
"""Tokens of a page whose heads are decoded together even where each has its tokens side by side: what a head has in a page ends
before a processor's prefetchers have followed it far. (Xeon with AVX-512, one thread, head dim 128, pages of 16 at random, head
after head: 8/8 heads take 1.37 times as long in fp32 and 1.16 in bf16, 32/8 heads 1.14 and 1.16, 16/8 in bf16 1.05.)"""
WIDTHS = tuple(16 << n for n in range(6))
"""Keys of a block among the choices."""


# -- what is served


def supports(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> Verdict:
    """Every obstacle on that processor that neither tensors nor the live machine decide."""
    obstacle = _device_obstacle(spec)
    return Verdict.of(
        obstacle,
        cpu_only(problem.device),
        "sums of float64 are no more exact than float64; precision='compensated' is served by tiled"
        if problem.carries_errors
        else None,
        _too_long(problem.program.structure),
        None if obstacle else _tile_obstacle(problem, spec),
    )


def declines(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> str | None:
    """Nothing that it can serve."""
    return None


def _device_obstacle(spec: DeviceSpec) -> str | None:
    if spec.is_gpu:
        return f"computes on a CPU; {spec.name} is a GPU"
    if spec.arch not in ARCHITECTURES:
        return f"has register tiles for {' and '.join(ARCHITECTURES)}, {spec.name} is {spec.arch}"
    if spec.arch == "x86_64" and spec.isa not in ("avx2", "avx512"):
        return f"needs AVX2 and FMA, which {spec.name} does not have"
    return None


def _too_long(structure: str) -> str | None:
    """Why a mask's integers and tensors do not fit into the argument block; None if they do."""
    left, wanted = ARGUMENTS - len(BACKWARD) - 1, len(mask_args(structure))
    return None if wanted <= left else f"the mask takes {wanted} arguments, more than {left}; write it with fewer terms"


# -- kernels


def matrix_unit(problem: Problem, kind: str, spec: DeviceSpec) -> str:
    """The unit whose tiles a kernel multiplies with; "" for vectors."""
    if kind == "decode":
        return "amx" if multiplies_byte_tiles(problem, spec) else ""
    fits = problem.dtype == "bfloat16" and not problem.widened and not problem.page
    return spec.matrix_unit if kind in MATRIX_KINDS and fits else ""


def multiplies_bytes(problem: Problem, kind: str, spec: DeviceSpec) -> bool:
    """Does decoding multiply int8 keys as they are? For that q must have few digits, and the processor SDOT or VPDPBUSD."""
    served = kind == "decode" and problem.stored == "int8" and problem.dtype in ("bfloat16", "float16") and not problem.widened
    fits = problem.head_dim % BYTE_COLUMNS == 0 and problem.head_dim <= MOST_BYTE_COLUMNS
    wanted = "asimddp" if spec.arch == "aarch64" else {"avx512": "avx512_vnni", "avx2": "avx_vnni"}.get(spec.isa)
    return served and fits and wanted in spec.isa_flags


def multiplies_byte_tiles(problem: Problem, spec: DeviceSpec) -> bool:
    """Does it so on matrix tiles? One query head a key head waits for memory as it is, and its weights are no tiles."""
    fits = problem.group > 1 and problem.head_dim % TILE_KEYS == 0 and problem.head_dim_v % BYTE_COLUMNS == 0
    has = spec.isa == "avx512" and {"amx_tile", "amx_int8"} <= set(spec.isa_flags)
    return fits and has and multiplies_bytes(problem, "decode", spec)


def register_for(problem: Problem, kind: str, spec: DeviceSpec, longest: int = 0) -> Register | None:
    """The register tile of a kernel for so many query rows (0: many). None where decoding cannot load the head dims."""
    size = _real_bytes(problem)
    if kind == "decode":
        return _decode_register(problem, spec)
    lanes = _lanes(problem, spec)
    if matrix_unit(problem, kind, spec):
        return Register(lanes, MATRIX_SIDE // lanes, MATRIX_SIDE)
    if spec.arch == "aarch64" and spec.isa != "neon":  # SVE machines run NEON's instructions too; kernels use those
        return Register(lanes, 4, 4)
    # the backward lays strips along the head dim as well, and a power of two divides that
    dim = max(problem.head_dim, problem.head_dim_v) if kind in ("forward", "jvp") else 0
    micro, _ = register_tile(spec, size, dim)
    if kind == "forward" and longest:
        micro = short_tile(spec, size, micro, longest)
    return Register(lanes, micro.row_vectors, micro.keys)


def _decode_register(problem: Problem, spec: DeviceSpec) -> Register | None:
    """Lanes and vectors lie along the head dim, `keys` counts query rows."""
    lanes = _lanes(problem, spec)
    while problem.head_dim % lanes or problem.head_dim_v % lanes:
        lanes //= 2
    if lanes < min(4, 16 // _real_bytes(problem)):
        return None
    rows = 4 if problem.group > 2 else problem.group
    return Register(lanes, 4 if rows == 4 else 8, rows)


def _lanes(problem: Problem, spec: DeviceSpec) -> int:
    size = _real_bytes(problem)
    return 16 // size if spec.arch == "aarch64" and spec.isa != "neon" else spec.lanes(size)


def _real_bytes(problem: Problem) -> int:
    """Of the values that are multiplied and summed."""
    return 8 if problem.arithmetic == "float64" else 4


def decode_obstacle(problem: Problem, spec: DeviceSpec, longest: int) -> str | None:
    """Why the decode kernel does not serve a call of so many queries; None if it does."""
    if longest != 1:
        return f"the decode kernel takes one query a head, here are {longest}"
    given = {"softcap": problem.softcap, "ALiBi": problem.alibi, "dropout": problem.dropout_p, "a bias": problem.bias}
    given["max_logit or entropy"] = watched(problem)
    given["invariant rows"] = problem.invariant
    if changed := [name for name, value in given.items() if value]:
        return f"the decode kernel has no {' and no '.join(changed)}"
    program = problem.program
    if not is_interval(program.structure) or any(kind.is_rows for kind in program.kinds):
        return "the decode kernel reads one interval of keys; this mask is none"
    if _decode_register(problem, spec) is None:
        return f"the decode kernel loads whole vectors; head dims {problem.head_dim} and {problem.head_dim_v} are none"
    return None


def watched(problem: Problem) -> bool:
    """Does the forward gather statistics on its way? The others are made by a sweep over the scores, once it is done."""
    return "max_logit" in problem.stats or "entropy" in problem.stats


def kernel_for(problem: Problem, tile: TilePlan, spec: DeviceSpec, bias_dtype: str = "", dbias: bool = False) -> Kernel:
    """The kernel that runs a tile."""
    assert tile.register_tile is not None
    rows, keys = tile.register_tile
    register = _decode_register(problem, spec) if tile.pass_ == "decode" else None
    kernel = _kernel(
        problem, tile.pass_, register or Register(_lanes(problem, spec), rows // _lanes(problem, spec), keys),
        _unit_of(tile), bias_dtype, dbias,
    )  # fmt: skip
    return kernel._replace(together=tile.groups > 1, bytes=multiplies_bytes(problem, tile.pass_, spec))


def _unit_of(tile: TilePlan) -> str:
    """The matrix unit that a kernel's name tells."""
    if tile.pass_ == "decode":
        return tile.kernel.removeprefix("decode_block").removeprefix("decode_stream").removeprefix("_")
    return tile.kernel.partition("_")[2] if tile.pass_ in MATRIX_KINDS else ""


def _kernel(
    problem: Problem, kind: str, register: Register, matrix: str, bias_dtype: str = "", dbias: bool = False
) -> Kernel:
    return Kernel(
        kind=kind,
        dtype=problem.dtype,
        tile=register,
        structure=problem.program.structure,
        softcap=problem.softcap > 0,
        bias=bias_dtype,
        alibi=problem.alibi,
        dropout=problem.dropout_p > 0,
        varlen=problem.varlen,
        dbias=dbias,
        matrix=matrix,
        double=problem.widened,
        origins=problem.origins and (problem.alibi or problem.dropout_p > 0),
        stats="entropy" in problem.stats if kind == "backward" else kind == "forward" and watched(problem),
        paged=problem.page > 0,
        stored=problem.stored,
        partial=problem.partial,
        invariant=problem.invariant,
    )


def grid_for(problem: Problem, tile: TilePlan, spec: DeviceSpec, longest: int) -> Tiles:
    """The tasks of a tile and the threads that share them."""
    count = -(-longest // tile.block_q)
    shape = (tile.heads, tile.block_q, tile.block_k)
    return blocks.assigned(problem, shape, count, tile.splits, threads_for(problem, spec), tile.groups)


# -- tiles


def tiles(problem: Problem, spec: DeviceSpec, *, longest: int | None = None, adjacent: bool = True) -> dict[str, TilePlan]:
    """What runs: the forward or the decode kernel, and the backward.

    `longest` is the number of queries of a packed batch's longest sequence; without, all are taken to be as long as each other.
    `adjacent` tells whether the columns of K and V are, which decoding asks for.
    """
    return {tile.pass_: tile for tile in (tile_for(problem, spec, kind, longest, adjacent) for kind in MATRIX_KINDS)}


def tile_for(
    problem: Problem, spec: DeviceSpec, direction: str, longest: int | None = None, adjacent: bool = True
) -> TilePlan:
    """The tile of a call's forward (or decode) kernel, or of its backward."""
    longest = even(problem).seqlen_q if longest is None else longest
    kind = _forward_kind(problem, spec, longest, adjacent) if direction == "forward" else direction
    asked = problem.asked(kind)
    if asked is None:
        return planned(problem, spec, kind, longest)
    # of a packed batch the register tile must not depend on data that came after the tile was accepted
    kernel = _kernel_of(problem, kind, spec, even(problem).seqlen_q)
    chosen = None if _misfit(kernel, asked) else blocks.given(problem, kernel, spec, longest, asked)
    if chosen is None:
        raise PlanError(_tile_obstacle(problem, spec) or f"tile: {asked[0]}×{asked[1]} does not fit")
    return _described(problem, kernel, spec, chosen, "user")


def planned(problem: Problem, spec: DeviceSpec, kind: str, longest: int) -> TilePlan:
    """The tile of one kernel, whatever was asked for."""
    kernel = _kernel_of(problem, kind, spec, longest)
    return _described(problem, kernel, spec, blocks.planned(problem, kernel, spec, longest))


def derives(problem: Problem, spec: DeviceSpec, *, derivative: str) -> Verdict:
    """Can the kernels compute a derivative of a problem that they serve?"""
    rounded = "what the gradients of float64 arithmetic are made of was rounded when it was stored; tiled sums it anew"
    return Verdict.of(
        None if derivative in DERIVED else f"has no {derivative}",
        rounded if problem.widened and derivative == "double_backward" else None,
    )


def derivative_tiles(problem: Problem, spec: DeviceSpec, derivative: str) -> dict[str, TilePlan]:
    return {derivative: tile_for(problem, spec, derivative)}


def _forward_kind(problem: Problem, spec: DeviceSpec, longest: int, adjacent: bool) -> str:
    """`decode` where that kernel serves the call, unless the forward's tile was asked for."""
    obstacle = decode_obstacle(problem, spec, longest)
    if adjacent and obstacle is None:
        return "decode" if problem.asked("decode") or not problem.asked("forward") else "forward"
    if problem.asked("decode") and not problem.asked("forward"):
        raise PlanError(f"tile: {obstacle or 'the decode kernel takes adjacent columns of K and V'}")
    return "forward"


def choices(problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    """Tiles that a kernel has, the planned one first: strips and their doublings by keys in powers of two, as far as a thread's
    frame has room for them. Other multiples of the register tile are served too."""
    longest = even(problem).seqlen_q
    if pass_ not in KINDS or (pass_ == "decode" and decode_obstacle(problem, spec, longest)):
        return []
    kernel = _kernel_of(problem, pass_, spec, longest)
    chosen = blocks.planned(problem, kernel, spec, longest)
    found = {(chosen.rows, chosen.keys): chosen}
    for size in _sizes(problem, kernel, longest):
        tiles = blocks.given(problem, kernel, spec, longest, size) if size not in found else None
        if tiles is not None:
            found[size] = tiles
    return [_described(problem, kernel, spec, tiles) for tiles in found.values()]


def _sizes(problem: Problem, kernel: Kernel, longest: int) -> list[tuple[int, int]]:
    """Rows and keys worth a try: up to the problem's own, and four of the least at least."""
    R, J = grain(kernel)
    if kernel.kind == "decode":
        return [(1, J * n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    rows = [R << n for n in range(12) if R << n <= max(8 * R, 2 * longest)]
    keys = [n for n in sorted({max(J, n) for n in WIDTHS}) if n <= max(64, 2 * problem.seqlen_k)]
    return [(m, n) for m in rows for n in keys]


def _kernel_of(problem: Problem, kind: str, spec: DeviceSpec, longest: int) -> Kernel:
    register = register_for(problem, kind, spec, longest)
    assert register is not None
    kernel = _kernel(problem, kind, register, matrix_unit(problem, kind, spec))
    # head after head would visit every page once for each of them
    near = problem.interleaved or 0 < problem.page <= SMALL_PAGE
    together = kind == "decode" and near and problem.kv_heads > 1
    return kernel._replace(together=together, bytes=multiplies_bytes(problem, kind, spec))


def _described(
    problem: Problem, kernel: Kernel, spec: DeviceSpec, chosen: Tiles, source: str = "model"
) -> TilePlan:
    """The TilePlan of blocks."""
    register, kind = kernel.tile, kernel.kind
    sides = (register.keys, ACCUMULATORS // register.keys) if kind == "decode" else (register.rows, register.keys)
    name = f"decode_{'stream' if register.keys == 1 else 'block'}" if kind == "decode" else kind
    return TilePlan(
        chosen.rows,
        chosen.keys,
        stages=1,
        warps=1,
        splits=chosen.splits,
        pass_=kind,
        source=source,
        kernel=f"{name}_{kernel.matrix}" if kernel.matrix else name,
        register_tile=sides,
        half_rows=kernel.half.rows if kernel.half else 0,
        heads=chosen.heads,
        groups=chosen.groups,
        outer="queries",
        on_chip=tuple(frames.layout(problem, kernel, chosen).items()),
        registers=_registers(kernel, spec),
        resident=1,
        reasons=reasons_for(problem, kernel, spec, chosen, source == "user"),
    )


def _registers(kernel: Kernel, spec: DeviceSpec) -> int:
    """Of the inner loop: sums, a strip's vectors and the keys' scalars; on matrix tiles its eight tile registers."""
    tile = kernel.tile
    if kernel.matrix:
        return 8
    if kernel.kind == "decode":
        return ACCUMULATORS + tile.keys + 1
    by_lane = spec.arch == "aarch64"
    return tile.vectors * tile.keys + tile.vectors + (-(-tile.keys // tile.lanes) if by_lane else 1)


# -- tiles that were asked for


def _tile_obstacle(problem: Problem, spec: DeviceSpec) -> str | None:
    """Why a tile that was asked for is not there, and which there are."""
    longest = even(problem).seqlen_q
    for pass_, *asked in problem.tile:
        if why := _why_not(problem, spec, pass_, (asked[0], asked[1]), longest):
            return refusal("cpu", pass_, (asked[0], asked[1]), choices(problem, spec, pass_), why)
    return None


def _why_not(problem: Problem, spec: DeviceSpec, pass_: str, asked: tuple[int, int], longest: int) -> str | None:
    if pass_ == "merge":
        return "splits are merged inside the kernel that computes them"
    if pass_ not in KINDS:
        return "one kernel gives dQ, dK and dV: its pass is 'backward'" if "backward" in pass_ else "has no such kernel"
    if pass_ == "decode" and (obstacle := decode_obstacle(problem, spec, longest)):
        return obstacle
    kernel = _kernel_of(problem, pass_, spec, longest)
    if misfit := _misfit(kernel, asked):
        return misfit
    if blocks.given(problem, kernel, spec, longest, asked) is None:
        one = blocks.assigned(problem, (1, *asked), 1, 1, 1)
        size = frames.frame(problem, kernel, one)
        return f"a thread's frame would take {size:,} bytes, and has {frames.ROOM:,}"
    return None


def _misfit(kernel: Kernel, asked: tuple[int, int]) -> str | None:
    (rows, keys), (m, n) = grain(kernel), asked
    if kernel.kind == "decode":
        return None if m == 1 and n % keys == 0 else f"decoding takes 1 row of each head and a multiple of {keys} keys"
    if m % rows or n % keys:
        return f"rows must be a multiple of {rows} and keys of {keys}, the register tile"
    return None
