"""Which kernel, and the fields of its argument block. Free of llvmlite: a cached kernel needs no IR."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.masks.program import is_interval, operands

FRAME_BYTES = 512  # the fields of a frame; its buffers follow
ALIGN = 16  # elements: every buffer starts on such a multiple
UNROLL = 4  # steps of a contraction per loop trip; register tiles have a multiple of it as J, to which head dims are padded
ACCUMULATORS = 16  # of decoding: rows by keys, or rows by vectors of the head dim
ARGUMENTS = 1024  # 64-bit arguments that fit into a block
BYTE_COLUMNS = 16  # of the head dim that a product of bytes takes at once
MOST_BYTE_COLUMNS = 256  # of a head dim whose products of bytes have sums of 32 bits
WEIGHT_LIMBS = 3  # bytes of a weight, where vectors multiply values as bytes
TILE_SIDE = 16  # rows of a matrix tile: keys, or digits of weights
TILE_HEADS = 4  # query heads whose digits are the columns of a matrix tile
TILE_KEYS = 64  # that a product of bytes on matrix tiles sums over; columns of the head dim as well
MASK_RANK = 4  # strides carried for each mask tensor


def round_up(value: Any, multiple: int) -> Any:
    """The next multiple at or above a number, or a value of generated code, that is not negative."""
    if multiple & (multiple - 1) == 0:
        return (value + (multiple - 1)) & -multiple
    return (value + (multiple - 1)) // multiple * multiple


def round_down(value: Any, multiple: int) -> Any:
    return value & -multiple if multiple & (multiple - 1) == 0 else value // multiple * multiple


class Register(NamedTuple):
    """A register tile: V vectors of L lanes by J broadcast values."""

    lanes: int
    vectors: int
    keys: int

    @property
    def rows(self) -> int:
        return self.lanes * self.vectors


LEAST_SUMS = 8
"""Accumulators of a half at least, or its products wait for each other: latency times FMAs a cycle."""


class Kernel(NamedTuple):
    """Everything that changes a kernel's code. Lengths, strides and numbers are arguments, never part of the key."""

    kind: str  # "forward", "backward", "decode", "jvp", "double_backward" or "sweep"
    dtype: str
    tile: Register
    structure: str = ""
    softcap: bool = False
    bias: str = ""  # the bias's dtype, "" without
    alibi: bool = False
    dropout: bool = False
    varlen: bool = False
    dbias: bool = False  # the backward's only: the bias wants a gradient
    matrix: str = ""  # products on tiles of a matrix unit, "amx"; "": on vectors
    double: bool = False  # float64 arithmetic of narrower inputs
    origins: bool = False  # dropout and ALiBi count the positions of a whole
    stats: bool = False  # the forward gives max logit and entropy; the backward takes what comes back to the entropy
    paged: bool = False  # K and V lie in pages
    together: bool = False  # a decoding task has several key heads, whose rows of a token lie side by side
    stored: str = ""  # the dtype of pages whose numbers have a scale; "": that of q
    bytes: bool = False  # scores of int8 keys are products of bytes
    partial: bool = False  # the output is stored in the type of the arithmetic
    invariant: bool = False  # key blocks and parts begin at fixed positions, and nothing else changes a row's sums

    @property
    def real(self) -> str:
        """The type of the arithmetic: inputs are widened to it as they are loaded, results narrowed as they are stored."""
        return "float64" if self.double or self.dtype == "float64" else "float32"

    @property
    def out(self) -> str:
        """The dtype of the output."""
        return self.real if self.partial else self.dtype

    @property
    def weighs_bytes(self) -> bool:
        """Does decoding multiply int8 values as they are? Of one row, weights are used before there are four of them."""
        return self.bytes and self.tile.keys > 1

    @property
    def weight_limbs(self) -> int:
        """Bytes of a weight there. Matrix tiles have room for four of each head at the same price."""
        return TILE_SIDE // TILE_HEADS if self.matrix else WEIGHT_LIMBS

    @property
    def digit_cells(self) -> int:
        """Cells in which the digits of a number of q lie, of four bytes each: matrix tiles have room for so many heads."""
        return TILE_HEADS // self.tile.keys if self.kind == "decode" and self.matrix else 1

    @property
    def backwards(self) -> bool:
        """Does a task have rows of one query head, and add to gradients of keys that other tasks add to?"""
        return self.kind in ("backward", "double_backward", "sweep")

    @property
    def score_unit(self) -> float:
        """Scores are in units of so many log 2. A bias may be any finite number, and times log2(e) some are none any more; times
        half of that they all are."""
        return 2.0 if self.bias else 1.0

    @property
    def plain(self) -> bool:
        """No score is changed between the product and the mask."""
        return not (self.softcap or self.bias or self.alibi)

    @property
    def half(self) -> Register | None:
        """The register tile of half a strip, which has steps of its own where each row sees one interval of keys (`halves.py`).
        Of three vectors the halves share one."""
        whole = self.kind == "forward" and self.plain and not (self.matrix or self.invariant)
        vectors = (self.tile.vectors + 1) // 2
        if not (whole and self.structure and vectors < self.tile.vectors and vectors * self.tile.keys >= LEAST_SUMS):
            return None
        return self.tile._replace(vectors=vectors)


# Arguments that change from call to call come first: the host writes them in one go, the rest from a template.
QKV = ("q", "k", "v", "o")
HOT = (*QKV, "lse", "count", "counter", *(f"{t}_{axis}" for t in QKV for axis in "bhsd"))
POINTERS = ("sinks", "bias", "alibi", "cu_q", "cu_k", "work", "done")
SIZES = (
    *("groups", "group", "together", "parts", "pairs", "Sq", "Sk", "D", "Dv", "BM", "BN", "blocks", "splits", "tasks"),
    "descending",
)
PADDED = ("DP", "DVP")
STRIDES = (*(f"bias_{axis}" for axis in "bhsd"), "alibi_b")
NUMBERS = ("q_factor", "cap_factor", "keep_factor", "grow_factor")
DROPOUT = ("seed", "threshold")
FORWARD = (*HOT, *POINTERS, *SIZES, *PADDED, *STRIDES, *NUMBERS, *DROPOUT)
GRADIENTS = (
    *("do", "dlse", "delta", "dq", "dk", "dv", "dbias", "progress", "pause"),
    *(f"{t}_{axis}" for t in ("do", "dq", "dbias") for axis in "bhsd"),
)
"""Those of a backward; they too follow each other, to be written in one go."""
BACKWARD = (*FORWARD, *GRADIENTS, "DR", "DVR", "PS", "ds_factor")
STATISTICS = {"forward": ("max_logit", "entropy", "key_lse"), "backward": ("dentropy", "mean")}
"""Those of a kernel with statistics, after the others: rows of the Real type, (B, Hq, Sq)."""
MOVING = ("qt", "kt", "vt", "bias_t")
"""Tangents, each an address that may be null and its strides."""
TANGENTS = (*MOVING, "lse_t", *(f"{t}_{axis}" for t in MOVING for axis in "bhsd"))
JVP = (*FORWARD, *TANGENTS, "sinks_t", "ot", *(f"ot_{axis}" for axis in "bhsd"))
DOUBLE_BACKWARD = (*BACKWARD, *TANGENTS, "delta_t", "ot", *(f"ot_{axis}" for axis in "bhsd"))
SWEEP = (*FORWARD, "mass", "top_weights", "top_indices", "top", "progress", "pause")
DOUBLES = (*NUMBERS, "ds_factor")
"""Passed as doubles; all others are integers and addresses."""


PAGED = (
    *("entries", "starts", "lengths", "page", "k_scale", "v_scale"),
    *(f"{t}_scale_{axis}" for t in "kv" for axis in "bsh"),
)
"""Of pages: the table, where a sequence's entries start, how many tokens it has; strides of the scales by page, place, head."""


INVARIANT = ("span",)
"""Keys of a part whose sums are complete before they join those of the parts before."""


def mask_tensors(structure: str) -> int:
    """How many tensors a mask structure reads."""
    return sum(kind.tensors for term in operands(structure) for kind, _, _ in term)


CLASSES = ("classes", "classes_b", "classes_h", "classes_r", "class_rows")
"""Two bits for each tile of a mask that is no interval, four tiles to a byte; their strides, and the rows of a tile."""


def mask_args(structure: str) -> tuple[str, ...]:
    """The arguments of a mask structure, after the fixed ones: its integers, each tensor's address and strides, its classes;
    where the ends of rows are listed, the order in which blocks of rows are started, or nothing."""
    ints = sum(kind.ints for term in operands(structure) for kind, _, _ in term)
    names = [f"mask_i{n}" for n in range(ints)]
    for n in range(mask_tensors(structure)):
        names += [f"mask_t{n}", *(f"mask_t{n}_{axis}" for axis in range(MASK_RANK))]
    listed = any(kind.is_rows for term in operands(structure) for kind, _, _ in term)
    return (*names, *(() if is_interval(structure) else CLASSES), *(("order",) if listed else ()))


def argument_names(kernel: Kernel) -> tuple[str, ...]:
    names = {"backward": BACKWARD, "jvp": JVP, "double_backward": DOUBLE_BACKWARD, "sweep": SWEEP}.get(kernel.kind, FORWARD)
    names += (STATISTICS[kernel.kind] if kernel.stats else ()) + (PAGED if kernel.paged else ())
    names += INVARIANT if kernel.invariant else ()
    names += mask_args(kernel.structure)
    return (*names, "origins") if kernel.origins else names
