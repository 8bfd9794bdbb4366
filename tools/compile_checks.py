"""The cases whose kernels `compile_kernels.py` compiles: tables, and problems without storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tools.listed_masks import LISTED

from tilewise import masks
from tilewise.lab.bench.cases import Case


class Target(NamedTuple):
    gpu: tuple[str, int | str, int]  # triton's GPUTarget
    device: str  # in tilewise's catalogue


TARGETS = {
    "sm_80": Target(("cuda", 80, 32), "a100-80"),
    "sm_90": Target(("cuda", 90, 32), "h200"),
    "sm_100": Target(("cuda", 100, 32), "b200"),
    "sm_120": Target(("cuda", 120, 32), "rtx5090"),
    "gfx942": Target(("hip", "gfx942", 64), "mi300x"),
}
HOPPER_ONLY = ("sm_90",)
MOST = ("sm_80", "sm_90", "sm_100", "gfx942")
CHECKED = ("sm_80", "sm_90")
"""Where loops must not use local memory."""


@dataclass(frozen=True)
class Check:
    """A case whose kernels are compiled, by the backend that has them; `kernels` () are all that it launches."""

    backend: str
    case: Case
    kernels: tuple[str, ...] = ()
    targets: tuple[str, ...] = tuple(TARGETS)
    few: bool = False  # enough to see that another triton takes the language the kernels use
    spills: int = 0  # accesses to local memory that its loops may have
    loose: bool = False  # packed sequences, or loads behind branches: Triton gives some of them fewer buffers than asked for
    maps: bool | None = None
    made: Callable[[], masks.Mask] | None = None  # a mask that a case has no words for
    part: bool = False  # of a whole, in which its origins lie
    page: int = 0  # tokens of a page
    stored: str = ""  # the dtype of pages with scales
    scaled: str = ""  # of what: "head" or "token"
    latent: int = 0  # columns of keys whose first are the values
    invariant: bool = False
    stats: tuple[str, ...] = ()
    moving: str = "qkv"  # inputs with a tangent, of a JVP on Hopper
    covered: bool = False

    @property
    def name(self) -> str:
        return f"{self.backend} {self.case.name}"


FIELDS = (
    *("few", "targets", "spills", "loose", "maps", "made", "part", "page", "stored", "scaled", "latent", "invariant", "stats"),
)


def portable(name: str, *kernels: str, d: int = 128, **more: Any) -> Check:
    own = {field: more.pop(field) for field in FIELDS if field in more}
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "seqlen": 1024, "head_dim": d, "dtype": "bfloat16"}
    return Check("triton", Case(name, **{**sizes, **more}), kernels, **own)


MAIN = ("forward", "keys", "queries")
CAREFUL = ("forward careful", "keys careful", "queries careful")
"""What runs where something is not finite: it may spill."""
CLASSIFIER = ("summary", "classify", "map", "pack")
DERIVATIVES = ("jvp", "second_queries", "second_keys", "second_bias")
STATISTICS = ("statistics", "mass", "top", "entropy_queries", "entropy_keys", "entropy_bias")
ROWS = ("merge_rows", "row_products")
DECODE = {"seqlen": 1, "kv_seqlen": 4096}
PAGES = {"mask": "causal", "lengths": (1, 1), "loose": True}
"""Packed queries over pages with room for 4096 keys of each sequence."""
TWO = ("sm_80", "sm_90")
FEATURES: dict[str, dict[str, Any]] = {
    "with a bias": {"bias": (1, 8, 1024, 1024)},
    "with ALiBi": {"alibi": True},
    "with a softcap": {"softcap": 30.0},
    "with dropout": {"dropout_p": 0.1},
}
"""Each alone."""
PORTABLE = (
    portable("d128", *MAIN, mask="causal", few=True),
    portable("d64", *MAIN, d=64, mask="causal", few=True),
    portable("d128 full", *MAIN),
    portable("d256", *MAIN, d=256, mask="causal"),
    portable("d256 full", *MAIN, d=256, targets=TWO),
    portable("fp16 d128", *MAIN, dtype="float16", mask="causal", targets=TWO),
    portable("fp32 d128", dtype="float32", mask="causal", few=True),
    portable("fp32 d64", *MAIN, d=64, dtype="float32", mask="causal", targets=TWO),
    portable("fp32 d256", *MAIN, d=256, dtype="float32", mask="causal", targets=TWO),
    portable("decode", "decode", "merge", few=True, **DECODE),
    portable("decode d64", "decode", d=64, targets=TWO, **DECODE),
    portable("decode d256", "decode", d=256, targets=TWO, **DECODE),
    portable("fp32 decode", "decode", "merge", dtype="float32", few=True, **DECODE),
    portable("pages of 16", "decode", "merge", "append", "join", page=16, few=True, targets=TWO, **PAGES),
    portable("pages of 256", "decode", page=256, targets=HOPPER_ONLY, **PAGES),
    portable("pages of 3", "decode", page=3, targets=("sm_80",), **PAGES),
    portable("pages of int8", "decode", "append", page=64, stored="int8", scaled="token", few=True, targets=TWO, **PAGES),
    portable("pages of float8", "decode", "append", page=64, stored="float8_e4m3fn", scaled="head", targets=TWO, **PAGES),
    portable("pages of float8, fp32", "decode", dtype="float32", page=64, stored="float8_e4m3fn", scaled="head", few=True,
             targets=HOPPER_ONLY, **PAGES),
    portable("pages of latents", "decode", d=512, latent=576, page=64, targets=TWO,
             **(PAGES | {"heads": 16, "kv_heads": 1})),
    portable("pages of 16, 256 rows", "decode", page=16, few=True, targets=TWO, **(PAGES | {"lengths": (64, 64)})),
    portable("pages of 16, 64 rows", "decode", page=16, targets=TWO, **(PAGES | {"lengths": (16, 16)})),
    portable("pages, prefill", "forward", page=16, few=True, targets=TWO, **(PAGES | {"lengths": (512, 512)})),
    portable("pages, drafts", "decode", page=16, made=lambda: drafts(), few=True, targets=TWO, **(PAGES | {"lengths": (4, 4)})),
    portable("pages, invariant", "decode", "merge", page=16, invariant=True, few=True, targets=TWO, **PAGES),
    portable("pages, invariant prefill", "forward", page=64, invariant=True, few=True, targets=TWO,
             **(PAGES | {"lengths": (8192, 8192)})),
    portable("pages, invariant int8", "decode", dtype="float16", page=64, stored="int8", scaled="token", invariant=True,
             targets=TWO, **PAGES),
    portable("pages, invariant latents", "decode", d=512, latent=576, page=64, invariant=True, targets=TWO,
             **(PAGES | {"heads": 16, "kv_heads": 1})),
    portable("prepare", "prepare", few=True),
    *(portable(f"bias d{d}", "bias", d=d, bias=(1, 8, 1024, 1024), targets=TWO) for d in (64, 128, 256)),
    portable("d512", "forward", d=512, targets=MOST),
    *(portable(f"derivatives d{d}", *DERIVATIVES, d=d, mask="causal", few=True, targets=MOST) for d in (64, 128)),
    *(portable(f"derivatives d{d} full", *DERIVATIVES, d=d, few=True, targets=TWO) for d in (64, 128)),
    *(portable(f"statistics d{d}", *STATISTICS, d=d, mask="causal", few=True, targets=MOST) for d in (64, 128)),
    *(portable(f"rows d{d}", *ROWS, d=d, few=True, targets=MOST) for d in (64, 128)),
    portable("derivatives of everything", *DERIVATIVES, d=64, softcap=30.0, alibi=True, sinks=True, dropout_p=0.1, targets=TWO,
             few=True),
    *(portable(f"derivatives bias d{d}", *DERIVATIVES, d=d, bias=(1, 8, 1024, 1024), targets=TWO)
      for d in (64, 128)),
    portable("statistics bias", *STATISTICS, d=64, bias=(1, 8, 1024, 1024), targets=TWO, spills=27),  # sm_80; on sm_90 4
    portable("d96 dv32 prefix", *MAIN, d=96, head_dim_v=32, mask="causal | prefix(7)", targets=MOST),
    portable("window fp16", *MAIN, dtype="float16", mask="window(64)", targets=MOST),
    portable("varlen", *MAIN, mask="causal", lengths=(512, 512), targets=MOST, few=True, loose=True),
    *(
        portable(f"{name} d{d}", *MAIN, d=d, mask="causal", targets=TWO, **given)
        for name, given in FEATURES.items() for d in (64, 128)
    ),
    portable("everything", *MAIN, "bias", d=64, few=True, softcap=30.0, bias=(1, 8, 1024, 1024), alibi=True, sinks=True,
             dropout_p=0.1, targets=MOST, loose=True),
    portable("part of a whole", *MAIN, d=64, mask="causal", alibi=True, dropout_p=0.1, part=True, few=True, targets=MOST,
             loose=True),
    *(
        portable(f"documents d{d}", *MAIN, *CAREFUL, *CLASSIFIER, d=d, mask="causal", data="documents", few=True, targets=MOST)
        for d in (64, 128)
    ),
    portable("documents varlen", *MAIN, *CLASSIFIER, made=lambda: packed_documents(), lengths=(512, 512), targets=TWO,
             loose=True),
    portable("documents with a bias", *MAIN, *CAREFUL, d=64, mask="causal", data="documents", bias=(1, 8, 1024, 1024), few=True,
             targets=HOPPER_ONLY),
    portable("documents fp32", *MAIN, d=64, dtype="float32", mask="causal", data="documents", targets=TWO),
    *(
        portable(f"{name} d{d}", *MAIN, *CLASSIFIER, d=d, made=made, targets=MOST, few=d == 64)
        for name, made in (("blocks", lambda: some_blocks()), ("dense", lambda: dense_mask())) for d in (64, 128)
    ),
    *(
        portable(f"first keys and window d{d}", *MAIN, *CLASSIFIER, d=d, mask="causal & (prefix(4) | window(100))", targets=TWO)
        for d in (64, 128)
    ),
    portable("selected or window", *MAIN, *CLASSIFIER, made=lambda: selected_or_window(), targets=TWO, few=True),
    portable("blocks and dense", *MAIN, *CLASSIFIER, d=64, made=lambda: blocks_or_not_dense(), targets=MOST, loose=True),
    *(
        portable(f"trusted d{d} {mask}{' varlen' * bool(lengths)}{' short' * (not maps)}", *MAIN, d=d, mask=mask, lengths=lengths,
                 maps=maps, targets=HOPPER_ONLY, few=True, loose=bool(lengths))
        for d in (64, 128) for mask in ("full", "causal") for lengths in ((), (512, 512)) for maps in (False, True)
    ),
)  # fmt: skip
"""The last ones are all that ptxas 12.8 is trusted with (`backends/gpu/assemble.py`): they are searched for lost addresses."""


def hopper(backend: str, name: str, d: int = 128, dv: int | None = None, few: bool = False, **more: Any) -> Check:
    own = {field: more.pop(field) for field in ("made", "stats", "moving", "covered") if field in more}
    sizes = {"batch": 2, "heads": 4, "seqlen": 3072, "head_dim": d, "head_dim_v": dv or d, "dtype": "bfloat16"}
    return Check(backend, Case(name, **{**sizes, **more}), targets=HOPPER_ONLY, few=few, **own)


WIDTHS = (64, 128, 256)
PACKED = {"lengths": (1536, 1536)}
MASKS: dict[str, dict[str, str]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal & window(100)"},
    "padding": {"data": "padding"},
    "causal padding": {"mask": "causal", "data": "padding"},
    "prefix-lm": {"mask": "causal | prefix(9)"},
    "offsets": {"data": "offsets"},
}
AHEAD = {"mask": "~causal"}
"""As the rows that wait for keys of another rank: those before the window's edge are hidden, and none after it."""
COVERED = {**LISTED["documents across"], "covered": True}
WHOLE_BIAS = (2, 4, 3072, 3072)
GPT_OSS = {"mask": "causal & window(128)"}
FORWARD_FEW = (
    *("d64 full", "d64 causal", "d128 full", "d128 window", "d128 causal varlen", "d256 causal", "d256 full long"),
    *("d128 documents lists", "d64 entropy full", "d128 entropy causal", "d192 dv128 causal"),
)
FORWARD: list[tuple[Any, ...]] = [
    *((f"d{d} {name}", d, mask) for d in WIDTHS for name, mask in MASKS.items()),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d in WIDTHS for dv in WIDTHS if d != dv),
    *((f"d{d} dv{d} causal", d, {"mask": "causal"}) for d in (32, 80, 96, 160, 192)),
    ("d192 dv128 causal", 192, {"dv": 128, "mask": "causal"}),
    *((f"d{d} {name} short", d, {**MASKS[name], "seqlen": 512}) for d in (64, 128) for name in ("full", "causal")),
    ("d256 full short", 256, {"seqlen": 512}),
    ("d64 causal 2048 queries", 64, {"mask": "causal", "seqlen": 2048}),
    ("d128 wide window", 128, {"mask": "causal & window(2000)"}),
    *((f"d{d} full tail", d, {"seqlen": 3000}) for d in WIDTHS),
    *((f"d{d} fp16", d, {"dtype": "float16"}) for d in WIDTHS),
    *((f"d{d} softcap", d, {"mask": "causal", "softcap": 20.0}) for d in WIDTHS),
    *((f"d{d} {name} varlen", d, {**MASKS[name], **PACKED}) for d in WIDTHS for name in ("full", "causal", "window")),
    ("negative scale", 128, {"scale": -1.0}),
    *((f"d{d} {stat} {name}", d, {**MASKS[name], "stats": (stat,)})
      for d in WIDTHS for name in ("full", "causal") for stat in ("max_logit", "entropy")),
    ("d128 entropy varlen", 128, {"mask": "causal", **PACKED, "stats": ("entropy",)}),
    *((f"d{d} sinks", d, {**GPT_OSS, "sinks": True}) for d in WIDTHS),
    *((f"d{d} sinks varlen", d, {**GPT_OSS, **PACKED, "sinks": True}) for d in (64, 128)),
    *((f"d{d} alibi {name}", d, {**MASKS[name], "alibi": True}) for d in WIDTHS for name in ("full", "causal")),
    ("d128 alibi varlen", 128, {"mask": "causal", **PACKED, "alibi": True}),
    *((f"d{d} dropout {name}", d, {**MASKS[name], "dropout_p": 0.1}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} bias {name}", d, {**MASKS[name], "bias": WHOLE_BIAS}) for d in WIDTHS for name in ("full", "causal")),
    ("d128 bias odd", 128, {"bias": (2, 4, 3072, 3071), "kv_seqlen": 3071}),
    ("d256 full long", 256, {"seqlen": 16384}),
    *((f"d{d} {name} lists", d, mask) for d in WIDTHS for name, mask in LISTED.items()),
    ("d192 documents lists", 192, LISTED["documents"]),
    *((f"d{d} documents across covered lists", d, COVERED) for d in WIDTHS),
    *((f"d{d} keys ahead", d, AHEAD) for d in WIDTHS),
    *(
        (f"d{d} {name} {m}x{n}", d, {**MASKS[name], "tile": (("forward", m, n),)})
        for d in (64, 128) for name in ("full", "causal") for m, n in ((128, 64), (192, 64))
    ),
]  # fmt: skip
FEATURES_FEW = (
    *("d64 sinks", "d128 sinks varlen", "d64 alibi full", "d128 alibi causal", "d64 dropout causal", "d128 dropout full"),
    *("d64 bias full", "d128 bias causal"),
)
"""Of both passes."""
BACKWARD_FEW = ("d64 full", "d128 causal", "d256 causal", "d128 causal grouped", "d128 causal varlen", "d64 causal deterministic",
                "d128 documents lists", "d128 documents lists deterministic")
BACKWARD_MASKS = ("full", "causal", "window", "padding", "prefix-lm", "offsets")
DETERMINISTIC = {"deterministic": True}
GROUPED: dict[str, dict[str, Any]] = {"": {}, " deterministic": DETERMINISTIC, " softcap": {"softcap": 20.0}}
"""Where heads that share keys take turns."""
BACKWARD: list[tuple[Any, ...]] = [
    *((f"d{d} {name}", d, MASKS[name]) for d in WIDTHS for name in BACKWARD_MASKS),
    *((f"d{d} {name} deterministic", d, {**MASKS[name], **DETERMINISTIC}) for d in (64, 128) for name in ("full", "causal")),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d, dv in ((128, 64), (64, 256), (256, 64), (192, 128))),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d, dv in ((32, 32), (80, 80), (96, 96), (192, 192))),
    *((f"d{d} causal grouped{name}", d, {**more, "mask": "causal", "kv_heads": 2})
      for d in WIDTHS for name, more in GROUPED.items()),
    *((f"d256 {name} grouped", 256, {"kv_heads": 2, **more})
      for name, more in (("full", {}), ("alibi", {"alibi": True}), ("dropout", {"dropout_p": 0.1}), ("varlen", PACKED))),
    *((f"d{d} fp16", d, {"dtype": "float16"}) for d in WIDTHS),
    *((f"d{d} softcap", d, {"mask": "causal", "softcap": 20.0}) for d in WIDTHS),
    *((f"d{d} sinks", d, {**GPT_OSS, "sinks": True}) for d in WIDTHS),
    *((f"d{d} alibi {name}", d, {**MASKS[name], "alibi": True}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} alibi deterministic", d, {"mask": "causal", "alibi": True, **DETERMINISTIC}) for d in (64, 128)),
    ("d128 alibi varlen", 128, {"mask": "causal", **PACKED, "alibi": True}),
    *((f"d{d} dropout {name}", d, {**MASKS[name], "dropout_p": 0.1}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} bias {name}", d, {**MASKS[name], "bias": WHOLE_BIAS}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} bias shared", d, {"bias": (1, 4, 3072, 3072)}) for d in (64, 128)),
    *((f"d64 bias gradient {name}", 64, {**MASKS[name], "bias": WHOLE_BIAS, "tile": (("backward_dkdv", 64, 128),)})
      for name in ("full", "causal")),
    ("d64 bias odd", 64, {"bias": (2, 4, 3072, 3071), "kv_seqlen": 3071}),
    ("d64 bias dropout softcap", 64, {"mask": "causal", "bias": WHOLE_BIAS, "dropout_p": 0.1, "softcap": 20.0}),
    ("d64 alibi dropout", 64, {"alibi": True, "dropout_p": 0.1}),
    ("d64 dropout varlen", 64, {"mask": "causal", **PACKED, "dropout_p": 0.1}),
    ("d64 softcap varlen", 64, {"mask": "causal", **PACKED, "softcap": 20.0}),
    ("d64 bias varlen", 64, {"mask": "causal", **PACKED, "bias": (2, 4, 1536, 1536)}),
    *((f"d{d} dropout", d, {"mask": "causal", "dropout_p": 0.1}) for d in (16, 32)),
    ("d64 negative scale", 64, {"scale": -1.0}),
    ("d64 documents dropout lists", 64, {**LISTED["documents"], "dropout_p": 0.1}),
    *((f"d64 {name} sums 64x128", 64, {**MASKS[name], "tile": (("backward", 64, 128),)}) for name in ("full", "causal")),
    *((f"d{d} causal varlen deterministic", d, {"mask": "causal", **PACKED, **DETERMINISTIC}) for d in (64, 128)),
    ("d128 softcap deterministic", 128, {"mask": "causal", "softcap": 20.0, **DETERMINISTIC}),
    *((f"d{d} {name} varlen", d, {**MASKS[name], **PACKED}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} {name} lists", d, mask) for d in WIDTHS for name, mask in LISTED.items()),
    *((f"d{d} documents lists deterministic", d, {**LISTED["documents"], **DETERMINISTIC}) for d in (64, 128)),
    *((f"d{d} documents across covered lists", d, COVERED) for d in WIDTHS),
    *((f"d{d} keys ahead", d, AHEAD) for d in WIDTHS),
    *((f"d{d} causal {m}x{n}", d, {"mask": "causal", "tile": (("backward_dkdv", m, n), ("backward_dq", 128, 64))})
      for d, m, n in ((64, 64, 128), (64, 64, 64), (128, 64, 64))),
]  # fmt: skip
JVP_FEW = ("d64 causal", "d128 full", "d128 causal")
JVP: list[tuple[Any, ...]] = [
    *((f"d{d} keys ahead", d, AHEAD) for d in (64, 128)),
    *((f"d{d} {name}", d, mask) for d in (64, 128) for name, mask in MASKS.items()),
    *((f"d{d} {name} varlen", d, {**MASKS[name], **PACKED}) for d in (64, 128) for name in ("full", "causal", "window")),
    *((f"d{d} causal of {x}", d, {**MASKS["causal"], "moving": x}) for d in (64, 128) for x in ("q", "v", "qk", "kv")),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d, dv in ((32, 32), (64, 128), (96, 96), (128, 64))),
    *((f"d{d} fp16", d, {"dtype": "float16"}) for d in (64, 128)),
    ("d128 full tail", 128, {"seqlen": 3000}),
    ("negative scale", 128, {"scale": -1.0}),
]  # fmt: skip
CHECKS = (
    *PORTABLE,
    *(hopper("hopper", name, d, few=name in (*FORWARD_FEW, *FEATURES_FEW), **more) for name, d, more in FORWARD),
    *(hopper("hopper-backward", name, d, few=name in (*BACKWARD_FEW, *FEATURES_FEW), **more) for name, d, more in BACKWARD),
    *(hopper("hopper-jvp", name, d, few=name in JVP_FEW, **more) for name, d, more in JVP),
)
BY_NAME = {check.name: check for check in CHECKS}
assert len(BY_NAME) == len(CHECKS), "two checks of one name"


def blocks_or_not_dense(length: int = 1024) -> masks.Mask:
    import torch

    table = torch.ones(1, 1, length // 64, length // 64, dtype=torch.bool)
    return masks.blocks(table, 64) | ~masks.dense(torch.ones(2, 1, length, length, dtype=torch.bool))


def packed_documents(tokens: int = 1024) -> masks.Mask:
    import torch

    return masks.causal() & masks.documents(torch.zeros(tokens, dtype=torch.int32))


def some_blocks(length: int = 1024) -> masks.Mask:
    import torch

    return masks.blocks(torch.ones(1, 1, length // 256, length // 256, dtype=torch.bool), 256)


def dense_mask(length: int = 1024) -> masks.Mask:
    import torch

    return masks.causal() & masks.dense(torch.ones(2, 1, length, length, dtype=torch.bool))


def selected_or_window(length: int = 1024) -> masks.Mask:
    import torch

    lists = torch.zeros(1, 1, length // 128, 2, dtype=torch.int32)
    return masks.causal() & (masks.selected(lists, 128, 128) | masks.window(100))


def drafts() -> masks.Mask:
    import torch

    return masks.causal() & masks.window(1000) & masks.tree(torch.tensor([[-1, 0, 0, 1]]))


def problem_of(check: Check) -> tuple[Any, Any]:
    """The problem, and tensors without storage."""
    problem, tensors = replace(check.case.problem(), needs_lse=True, device="cuda"), check.case.tensors()
    problem = replace(problem, stats=check.stats, covered=check.covered)
    if check.made:
        problem = replace(problem, mask=check.made())
    inputs = check.case.inputs(tensors)
    if check.page:
        room = problem.batch * (4096 // check.page) * check.page
        problem = replace(problem, page=check.page, stored=check.stored, seqlen_k=room, rows=problem.seqlen_q // problem.batch)
        problem = replace(problem, invariant=check.invariant)
    if check.latent:
        problem = replace(problem, head_dim=check.latent)
        inputs = inputs._replace(q=inputs.q.new_empty((*inputs.q.shape[:3], check.latent)))
    if check.part:
        problem, inputs = replace(problem, origins=True), inputs._replace(origins=inputs.q.new_empty((2, 4)).int())
    return problem, type(inputs)(*(None if x is None else x.to("meta") for x in inputs))
