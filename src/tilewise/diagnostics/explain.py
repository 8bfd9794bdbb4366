"""`explain`: which backend and plan a call gets, why not the others, what it moves and how long it should take."""

from __future__ import annotations

from typing import Any, Unpack, cast

from torch import Tensor

from tilewise.api.cache import KVCache
from tilewise.api.cached_plan import CachedPlan
from tilewise.api.names import BackendName
from tilewise.api.options import CallOptions
from tilewise.api.parse import parse_call
from tilewise.api.rotary import RotaryTable
from tilewise.backends.base import Inputs
from tilewise.diagnostics.cached import Asked, explain_cached
from tilewise.diagnostics.explanation import Explanation, Tiles
from tilewise.diagnostics.measured import Measured, measure_call
from tilewise.diagnostics.plan import TileArgument, asked, machine, plan_of, servers
from tilewise.errors import ArgumentError, ArgumentTypeError
from tilewise.hardware import DeviceSpec
from tilewise.masks import MaskShape, TileCounts, TileMap
from tilewise.model import TilePlan
from tilewise.model.grid import even
from tilewise.problem import Problem


class ExplainedOptions(CallOptions, total=False):
    """What a call that is explained takes: beside the options of `attention` those of `attention_cached`."""

    new: tuple[Tensor, Tensor] | None
    rotary: RotaryTable | None
    splits: int | None
    plan: CachedPlan | None
    invariant: bool


def explain(
    q: Tensor | Problem,
    k: Tensor | KVCache | None = None,
    v: Tensor | None = None,
    *,
    device: str | DeviceSpec | None = None,
    backend: BackendName = "auto",
    tile: TileArgument | None = None,
    pass_: str = "auto",
    measure: bool = False,
    **options: Unpack[ExplainedOptions],
) -> Explanation:
    """Explain the call `attention(q, k, v, …)`, or a Problem, for which neither tensors nor its device are needed.

    q: queries (B, Hq, Sq, D), or a Problem alone.
    k: keys (B, Hk, Sk, D); or a KVCache, without v: then the call is that of `attention_cached`, with q and options as it takes
        them, and the answer has the pages that are read, and all launches. Nothing is written.
    v: values (B, Hk, Sk, Dv).
    device: the machine to explain it for: a name such as "h200" or a DeviceSpec; None for that of the tensors, or this one.
    backend: "auto", or one by name.
    tile: your own tile, (queries, keys), or such a pair for each pass that a dict names; it is what runs with `measure`.
    pass_: the kernel whose figures are wanted: "auto", "forward", "decode", "backward", "backward_dkdv", "backward_dq", …
    measure: run the call, and say where its time goes.
    options: all else that `attention` takes; with `cu_seqlens_q` (and `cu_seqlens_k`) the call is that of `attention_varlen`.

    >>> print(tw.explain(q, k, v, mask=tw.causal()))
    >>> print(tw.explain(q, cache, mask=tw.causal()))
    >>> print(tw.explain(tw.Problem.of(heads=32, kv_heads=8, seqlen=8192, head_dim=128, mask=tw.causal()), device="h200"))
    """
    inputs = None
    if isinstance(q, Problem):
        if k is not None or v is not None or options:
            raise ArgumentError("explain: got a Problem with further arguments; what they say belongs in the Problem")
        problem = q
        if device is None and problem.device == "cpu":
            device = "cpu"
    elif isinstance(k, KVCache):
        if v is not None or tile is not None or pass_ != "auto":
            raise ArgumentError("explain: a cache takes neither v, tile nor pass_; attention_cached has none of them")
        return explain_cached(q, k, dict(options), Asked(device=device, backend=backend, measure=measure))
    elif k is None or v is None:
        raise ArgumentTypeError("explain: need q, k and v, q and a KVCache, or a Problem alone")
    else:
        problem, inputs = parse_call(q, k, v, cast(CallOptions, options))
        device = str(inputs.q.device) if device is None else device
    spec, live = machine(device)
    problem = asked(problem, spec, tile, pass_)
    serving = servers(problem, spec, live, backend, inputs if live else None)
    plan = plan_of(problem, spec, serving, pass_)
    chosen = plan.backend
    measured: Measured | None = None
    if measure:
        if not live or chosen is None:
            raise ArgumentError(
                f"measure: {spec.name} is not this machine, or no backend serves the call here; leave it out"
            )
        measured = measure_call(problem, inputs, chosen, plan)
    return Explanation(
        problem=problem,
        spec=spec,
        live=live,
        server=chosen,
        gradients=serving.name("backward"),
        asked=backend,
        choices=serving.choices(pass_),
        plan=plan,
        tiles=_tiles(plan.problem, inputs, plan.tile),
        measured=measured,
        notes=_notes(problem, live),
    )


def _tiles(problem: Problem, inputs: Inputs | None, tile: TilePlan) -> Tiles:
    """Tiles by class over all sequences and heads; of a packed batch, by its real lengths where they are known."""
    counts: list[TileCounts] = []
    if problem.varlen and inputs is not None and inputs.cu_q is not None and inputs.cu_k is not None:
        starts: tuple[Any, Any] = inputs.cu_q.tolist(), inputs.cu_k.tolist()
        for b in range(problem.batch):
            (q0, q1), (k0, k1) = (side[b : b + 2] for side in starts)
            program = problem.program.for_sequence(b, q0, q1, k0, k1)
            shape = MaskShape(1, problem.heads, q1 - q0, k1 - k0)
            counts.append(TileMap(program, shape, tile.block_q, tile.block_k).counts())
    else:
        same = even(problem)
        counts.append(TileMap(same.program, same.shape, tile.block_q, tile.block_k).counts())
    skipped, masked, full = (sum(side) for side in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return Tiles(tile.block_q, tile.block_k, full, masked, skipped)


def _notes(problem: Problem, live: bool) -> tuple[str, ...]:
    notes = []
    if not live:
        notes.append("the device is not this machine: what serves there is what the backends say of it, not tried")
    if problem.varlen:
        notes.append("bytes and times take the packed sequences as equally long")
    if problem.stats:
        notes.append(f"statistics: {', '.join(problem.stats)}; bytes and times are those of the call without them")
    if "key_mass" in problem.stats:
        notes.append("key_mass takes a second sweep over the scores, one product QKᵀ more, once every row's log-sum-exp is known")
    if problem.top:
        notes.append(f"top({problem.top}): cpu ranks in the sweep of key_mass, triton in another, each one product QKᵀ more")
    return tuple(notes)
