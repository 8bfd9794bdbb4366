"""Problem: a frozen description of one attention call. One object travels through every layer; a feature is a field."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.masks import UNBOUNDED, Binding, Full, Mask, MaskProgram, MaskShape
from tilewise.masks.build import is_integer, plain

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
PRECISIONS = ("default", "tf32", "compensated", "double")
WIDE = ("compensated", "double")
"""Precisions that compute in float64. Sums of float64 inputs have no wider type: "compensated" carries what rounding takes from
them, "double" is the default."""
MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 576
"""Of queries and keys in pages, whose values may be fewer columns."""
PASSES = (
    *("forward", "decode", "merge", "fp16_split"),
    *("backward", "backward_dkdv", "backward_dq", "backward_dbias", "backward_preprocess", "backward_postprocess"),
    *("jvp", "double_backward", "double_backward_dkdv", "double_backward_dq", "double_backward_dbias", "sweep"),
)
"""The kernels of a call by what they compute; `backward` is one that gives dQ, dK and dV at once."""
DECODE_ROWS = 64
"""Up to so many rows (queries × heads of a group) one tile holds all rows of a key head."""
TileRequest = tuple[tuple[str, int, int], ...]
_SIZES = (
    *((name, 0, UNBOUNDED - 1) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")),
    *((name, 1, MAX_HEAD_DIM) for name in ("head_dim", "head_dim_v")),
)
"""Fields that are sizes, with the least and the greatest value of each."""
SETTINGS = ("scale", "softcap", "dropout_p", "precision", "deterministic", "needs_lse")
"""Fields that neither the tensors nor the mask of a call tell; the operators carry them as arguments."""
STATISTICS = ("max_logit", "entropy", "key_mass")
"""Statistics by name; `top(k)`, the k largest weights of a row, is one more for every k."""
MAX_TOP = 64
ALIASES = {"half": "float16", "float": "float32", "bf16": "bfloat16"} | {f"fp{n}": f"float{n}" for n in (16, 32, 64)}


class Origin(NamedTuple):
    """Where a sequence of a call begins in a larger call that it is a part of: dropout and ALiBi count positions there.

    The whole has as many queries as keys. Bias, slopes, sinks and mask are those of the part.
    """

    q: int
    k: int
    head: int
    batch: int
    """The whole's number of the sequence."""


@dataclass(frozen=True)
class Problem:
    """The frozen description of one call; made by `Problem.of`, which has defaults and checks.

    batch: sequences, also in a packed batch.
    heads: query heads; `kv_heads`: heads of keys and values, of which it is a multiple.
    seqlen_q: queries of a sequence; `seqlen_k`: its keys. In a packed batch both count the tokens of all sequences.
    head_dim: the dimension of queries and keys; `head_dim_v`: that of values.
    dtype: "float16", "bfloat16", "float32" or "float64".
    mask: which keys a query sees, such as `causal()`.
    scale: what scores are multiplied by.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    bias: the shape of a tensor that is added to the scores; None for none.
    alibi: whether ALiBi slopes are given; `sinks`: whether sinks are.
    dropout_p: the probability with which a weight is dropped.
    varlen: whether the batch is packed.
    origins: whether the call is a part of a larger one, and is told where in it each of its sequences lies.
    precision: "default", "tf32", "compensated" or "double".
    deterministic: whether the same bits are wanted run after run.
    needs_grad: whether gradients will be asked for.
    needs_lse: whether anybody but the gradients looks at the log-sum-exp.
    device: "cpu" or "cuda".
    tile: the tiles asked for, each as (pass, block_q, block_k); () leaves the choice to the backend.
    stats: the statistics asked for, such as ("max_logit", "entropy", "key_mass", "top(8)").
    interleaved: whether the heads of a token lie side by side in K and V, as with layout="bshd", and not the tokens of a head.
    page: tokens of a page, where keys and values lie in pages; 0 where they do not.
    rows: queries of each sequence of a packed batch, where all have as many; 0 where that is not known.
    stored: the dtype of pages whose numbers have a scale, "int8" or "float8_e4m3fn"; "" where they have none.
    splits: the parts that the keys of a sequence in a cache are split into; 0 leaves the choice to the backend.
    partial: whether the output is a part, wanted in the dtype of the arithmetic, to be merged with others.
    invariant: whether the bits of a row must follow from the row alone, and not from the batch around it.
    covered: whether it is known that every query sees a key, and that every key is seen, where the mask's tensors alone tell.

    >>> problem = tw.Problem.of(heads=32, kv_heads=8, seqlen=8192, head_dim=128, mask=tw.causal())
    >>> print(tw.plan(problem, device="h200"))
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: Mask
    scale: float
    softcap: float = 0.0
    bias: tuple[int, int, int, int] | None = None
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    varlen: bool = False
    origins: bool = False
    precision: str = "default"
    deterministic: bool = False
    needs_grad: bool = False
    needs_lse: bool = True
    device: str = "cpu"
    tile: TileRequest = ()
    stats: tuple[str, ...] = ()
    interleaved: bool = False
    page: int = 0
    rows: int = 0
    stored: str = ""
    splits: int = 0
    partial: bool = False
    invariant: bool = False
    covered: bool = False
    memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False, hash=False)
    """What layers keep of their work on this problem: the lowered mask, failed kernels, the backend of the gradients. It
    lives and dies with the problem, which the call cache keeps or drops."""

    @classmethod
    def of(
        cls,
        *,
        heads: int,
        head_dim: int,
        seqlen: int,
        batch: int = 1,
        kv_heads: int | None = None,
        kv_seqlen: int | None = None,
        head_dim_v: int | None = None,
        dtype: str = "bfloat16",
        mask: Mask | None = None,
        scale: float | None = None,
        **features: Any,
    ) -> Problem:
        """A problem with the usual defaults: as many key heads, keys and value dims as query ones, and scale 1/√d.

        heads: query heads.
        head_dim: the dimension of queries and keys, up to 512.
        seqlen: queries of a sequence, and keys unless `kv_seqlen` is given.
        batch: sequences.
        kv_heads: heads of keys and values, of which `heads` is a multiple.
        kv_seqlen: keys of a sequence.
        head_dim_v: the dimension of values.
        dtype: "float16", "bfloat16", "float32" or "float64"; also "fp16", "bf16", "fp32", "fp64".
        mask: a mask such as `causal()`; None for none.
        scale: what scores are multiplied by; 1/√head_dim if None.
        features: other fields of a Problem: `softcap`, `dropout_p`, `sinks=True`, `alibi=True`, `device="cuda"`, …

        >>> tw.Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=8192, head_dim=128, mask=tw.causal())
        """
        batch, heads, head_dim, seqlen = plain(batch), plain(heads), plain(head_dim), plain(seqlen)
        if scale is None:
            scale = 1.0 / math.sqrt(head_dim) if isinstance(head_dim, int) and head_dim > 0 else 1.0
        features |= {name: unboxed(features[name]) for name in ("softcap", "dropout_p") if name in features}
        features["tile"] = tile_request(features.get("tile"))
        features["stats"] = stats_request(features.get("stats"))
        problem = cls(
            batch=batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else plain(kv_heads),
            seqlen_q=seqlen,
            seqlen_k=seqlen if kv_seqlen is None else plain(kv_seqlen),
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else plain(head_dim_v),
            dtype=ALIASES.get(dtype, dtype),
            mask=Full() if mask is None else mask,
            scale=unboxed(scale),
            **features,
        )
        problem.check()
        return problem

    @property
    def shape(self) -> MaskShape:
        return MaskShape(self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    @property
    def program(self) -> MaskProgram:
        """The mask, lowered once."""
        program: MaskProgram | None = self.memory.get("program")
        if program is None:
            program = self.memory["program"] = self.mask.lower(Binding(self.shape, self.varlen, kv_heads=self.kv_heads))
        return program

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def kv_itemsize(self) -> int:
        """Of keys and values, which may be stored narrower."""
        return 1 if self.stored else self.itemsize

    @property
    def arithmetic(self) -> str:
        """The dtype of scores, weights, sums and the log-sum-exp: "float32" or "float64"."""
        return "float64" if self.dtype == "float64" or self.precision in WIDE else "float32"

    @property
    def widened(self) -> bool:
        """Is the arithmetic float64 although the inputs are narrower?"""
        return self.arithmetic == "float64" != self.dtype

    @property
    def carries_errors(self) -> bool:
        """Are sums of float64 wanted more exact than float64 is?"""
        return self.dtype == "float64" and self.precision == "compensated"

    @property
    def decodes(self) -> bool:
        """Are there so few queries that all rows of a key head fit one tile, and so many keys that reading them is the work?

        The one definition of decoding. A tile asked for the forward chooses the forward's kernel.
        """
        rows, keys, most = self.seqlen_q, self.seqlen_k, DECODE_ROWS
        if self.page:  # packed always: on average; some tiles hold the heads of a latent, or who shares a prefix
            rows, keys, most = -(-rows // max(1, self.batch)), keys // max(1, self.batch), 8 * DECODE_ROWS
        few = (self.page or not self.varlen) and rows * self.group <= most and keys >= 4 * rows * self.group
        return bool(few) and self.asked("forward") is None

    @property
    def top(self) -> int:
        """How many of a row's largest weights are asked for."""
        return next((top_size(name) for name in self.stats if name not in STATISTICS), 0)

    def asked(self, pass_: str) -> tuple[int, int] | None:
        """The tile that the user wants for a pass; None for none."""
        return next(((m, n) for name, m, n in self.tile if name == pass_), None)

    def check(self) -> None:
        """Raise unless every field is sane. Sizes are compared as they are, so symbolic ones work too."""
        for name, least, most in _SIZES:
            value = getattr(self, name)
            if type(value) is not int and not is_integer(value):
                raise ArgumentTypeError(f"{name}: got {value!r} ({type(value).__name__}), need an integer")
            if name == "head_dim" and self.page:
                most = MAX_LATENT_DIM
            if value < least or value > most:
                raise ArgumentError(f"{name}: got {value}, need {least} to {most}")
        if self.kv_heads != self.heads and (self.kv_heads == 0 or self.heads % self.kv_heads != 0):
            raise LayoutError(
                f"heads: {self.heads} query heads and {self.kv_heads} key heads; the first must be a multiple of the second"
            )
        if self.dtype not in ITEMSIZE:
            raise ArgumentTypeError(f"dtype: got {self.dtype!r}, need one of {', '.join(ITEMSIZE)}")
        if not isinstance(self.mask, Mask):
            raise ArgumentTypeError(
                f"mask: got {type(self.mask).__name__}, need a mask such as causal(); wrap a boolean tensor in dense(...)"
            )
        for name in ("scale", "softcap", "dropout_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ArgumentTypeError(f"{name}: got {value!r}, need a number")
            if not abs(value) <= sys.float_info.max:  # a comparison, since symbolic numbers have no isfinite
                raise ArgumentError(f"{name}: got {value}, need a finite number")
        if self.softcap < 0:
            raise ArgumentError(f"softcap: got {self.softcap}, need 0 (off) or a positive number")
        if not 0 <= self.dropout_p < 1:
            raise ArgumentError(f"dropout_p: got {self.dropout_p}, need a probability in [0, 1)")
        if self.precision not in PRECISIONS:
            raise ArgumentError(f"precision: got {self.precision!r}, need one of {', '.join(PRECISIONS)}")


def tile_request(tile: Any) -> TileRequest:
    """What `tile=` asks for, in one form: a pair is the forward's, a mapping has a pair for each pass it names."""
    if tile is None:
        return ()
    if isinstance(tile, tuple) and all(isinstance(one, tuple) and len(one) == 3 for one in tile):
        tile = {pass_: (m, n) for pass_, m, n in tile}  # in that form already
    pairs = dict(tile) if isinstance(tile, Mapping) else {"forward": tile}
    request = []
    for pass_, pair in sorted(pairs.items(), key=str):
        if pass_ not in PASSES:
            raise ArgumentError(f"tile: got the pass {pass_!r}, need one of {', '.join(PASSES)}")
        sizes = tuple(map(plain, pair)) if isinstance(pair, (tuple, list)) else ()
        if len(sizes) != 2 or not all(is_integer(size) and 0 < size < UNBOUNDED for size in sizes):
            raise ArgumentError(
                f"tile: got {pair!r}, need two positive integers, (block_q, block_k), such as (128, 64), "
                'or a mapping of passes to them, such as {"forward": (128, 64)}'
            )
        request.append((pass_, *sizes))
    return tuple(request)


def top(k: int) -> str:
    """The statistic "the k largest weights of each row, and their keys", for `stats` of `attention`.

    k: how many, 1 to 64.

    >>> out, stats = tw.attention(q, k, v, stats=(tw.top(8),))
    >>> stats.top.weights, stats.top.indices                                       # (B, Hq, Sq, 8) each
    """
    if isinstance(k, bool) or not is_integer(k):
        raise ArgumentTypeError(f"top: got {k!r}, need an integer from 1 to {MAX_TOP}")
    if not 1 <= k <= MAX_TOP:
        raise ArgumentError(f"top: got {k}, need 1 to {MAX_TOP}")
    return f"top({plain(k)})"


def top_size(name: str) -> int:
    """The k of "top(k)"; 0 for anything else."""
    text = name[4:-1]
    return int(text) if name == f"top({text})" and text.isdecimal() and text.isascii() else 0


def stats_request(stats: Any) -> tuple[str, ...]:
    """What `stats=` asks for, in one form: names in a fixed order. Raises for what is no statistic, or asked for twice."""
    if stats is None:
        return ()
    known = f"{', '.join(STATISTICS)} or top(k)"
    if isinstance(stats, str):
        raise ArgumentTypeError(f"stats: got {stats!r}, need a tuple of statistics, such as ({stats!r},)")
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise ArgumentTypeError(f"stats: got {type(stats).__name__}, need a tuple of {known}")
    for name in stats:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"stats: got {name!r}, need {known}")
        if name not in STATISTICS and not top_size(name):
            raise ArgumentError(f"stats: got {name!r}, need {known}")
    names = [name for name in STATISTICS if name in stats]
    tops = [top(top_size(name)) for name in stats if name not in STATISTICS]
    if len(tops) > 1:
        raise ArgumentError(f"stats: got {' and '.join(tops)}; ask for the largest of them alone")
    if len(names) + len(tops) < len(stats):
        raise ArgumentError(f"stats: got one twice in {tuple(stats)}")
    return (*names, *tops)


def tile_text(request: TileRequest) -> str:
    """A request as text, such as "backward:64x32,forward:128x64"."""
    return ",".join(f"{pass_}:{m}x{n}" for pass_, m, n in request)


def tile_of_text(text: str) -> dict[str, tuple[int, ...]]:
    """What such a text asks for; a size without a pass is the forward's."""
    tile: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split(",")):
        pass_, _, sizes = part.rpartition(":")
        try:
            tile[pass_.strip() or "forward"] = tuple(int(size) for size in sizes.lower().replace("×", "x").split("x"))
        except ValueError:
            raise ArgumentError(f"tile: got {part!r}, need two sizes such as 128x64, or backward:64x64") from None
    return tile


def unboxed(value: Any) -> Any:
    """A number of numpy's as the Python number that it holds; anything else as it is."""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    return value.item() if isinstance(value, np.number) else value
