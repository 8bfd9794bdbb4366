"""`tilewise.distributed.attention`: attention over the ranks of a plan, each with its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.execute import restore_layout
from tilewise.api.keywords import check_keywords
from tilewise.api.options import BatchOptions, parameters, show_signature
from tilewise.api.parse import LAYOUTS, autocast, check_shapes, check_sinks, check_tensors, make_seed, split_bias
from tilewise.backends.base import Inputs, Needs, rounded
from tilewise.distributed.agree import agree, check_place, same
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Link
from tilewise.distributed.heads import Team, ToHeads, ToTokens
from tilewise.distributed.passes import Backward, Cotangents, Forward
from tilewise.distributed.segments import Call, Local
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, PlanError, TilewiseError
from tilewise.masks import MaskShape
from tilewise.ops.tensors import check_kinds, dtype_name, materialized
from tilewise.problem import Problem, tile_request, unboxed


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, *, return_lse: Literal[True], **options: Unpack[BatchOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[BatchOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, *, return_lse: bool, **options: Unpack[BatchOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, *, return_lse: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over all ranks of a plan; every rank calls it with its own tokens, and gets their results.

    The result, its gradients and the dropout mask are those of `attention` over the whole sequences on one machine.

    q: this rank's queries (B, Hq, tokens, D), or (tokens, Hq, D) where the plan has `lengths`: `plan.shard` of the whole.
    k: its keys (B, Hk, tokens, D).
    v: its values (B, Hk, tokens, Dv).
    plan: made by `tilewise.distributed.plan`; it has the mask, so `mask=` is not taken here.
    return_lse: return the log-sum-exp (B, Hq, tokens) too.
    options: those of `attention`. What is not given is taken from the plan's problem. A tensor `bias` has this rank's rows and
        all keys of their sequence, (B or 1, Hq or 1, tokens or 1, S or 1). `sinks` and slopes are whole on every rank; a gradient
        of `sinks`, like that of a weight, is to be summed over the ranks. With dropout and no `seed`, rank 0 draws one.

    Generation has no place here: queries are as many as keys.

    >>> plan = tw.distributed.plan(problem, group)
    >>> out = tw.distributed.attention(plan.shard(q, 2), plan.shard(k, 2), plan.shard(v, 2), plan)
    """
    if not isinstance(plan, ContextPlan):
        raise ArgumentTypeError(f"plan: got {type(plan).__name__}, need a plan; make one with tw.distributed.plan(...)")
    if plan.group is None and plan.ranks > 1:
        raise PlanError(f"plan: simulates {plan.ranks} ranks and has no process group; plan with one to compute")
    call, local = _parsed(q, k, v, plan, {**options, "return_lse": return_lse})
    if call.problem.dropout_p and local.seed is None:
        local = local._replace(seed=_common_seed(plan, call.device))
    out, lse = attend(call, link_of(plan), local)
    return restore_layout(call.problem, options.get("layout", "bhsd"), out, lse)


show_signature(attention, parameters(BatchOptions))


def link_of(plan: ContextPlan) -> Link:
    """The connection of a plan, which counts what is sent."""
    link: Link | None = plan.memory.get("link")
    if link is None:
        link = plan.memory["link"] = Link(plan.group, plan.rank)
    return link


def attend(call: Call, link: Link, local: Local) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's tokens, with a gradient where one is wanted; lse may be empty where nobody looks at it."""
    if call.plan.heads > 1:
        return _by_heads(call, link, local)
    if call.problem.needs_grad:
        out, lse = _Attention.apply(call, link, *local)  # type: ignore[no-untyped-call]
        return out, lse
    out, lse, _ = _forward(call, link, local)
    return out, lse


def _by_heads(call: Call, link: Link, local: Local) -> tuple[Tensor, Tensor]:
    """Attention over a part of the heads of more tokens, between two exchanges."""
    team: Team | None = call.memory.get("team")
    if team is None:
        team = call.memory["team"] = Team(call.plan, link, call.device)
        first = team.member * team.plan_of_teams.problem.heads
        call.memory["part"] = replace(call, plan=team.plan_of_teams, head=first)
    q, k, v = ToHeads.apply(team, "q, k and v", *local[:3])  # type: ignore[no-untyped-call]
    bias, alibi, sinks = local.bias, local.alibi, local.sinks
    part = Local(
        *(q, k, v),
        bias if bias is None or bias.shape[1] == 1 else team.part(bias, team.member),
        None if alibi is None else team.part(alibi, team.member),
        None if sinks is None else team.part(sinks[None], team.member)[0],
        local.seed,
    )
    out, lse = attend(call.memory["part"], team.link_of_teams, part)
    out = ToTokens.apply(team, "out", out)  # type: ignore[no-untyped-call]
    if call.problem.needs_lse:
        lse = ToTokens.apply(team, "lse", lse)  # type: ignore[no-untyped-call]
    return out, lse


def _forward(call: Call, link: Link, local: Local) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse of this rank, and out as the backward wants it: unrounded where float64 was asked for."""
    total, lse = Forward(call, link, local).compute()
    out = rounded(total, local.q.dtype)
    return out, lse, total if call.problem.widened else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, link: Link, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, kept = _forward(call, link, Local(*tensors))  # type: ignore[arg-type]
        ctx.call, ctx.link = call, link
        ctx.save_for_backward(*tensors, kept, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        local = Local(*tensors)
        required = dict(zip(Local._fields, ctx.needs_input_grad[2:], strict=True))
        needs = Needs(*(required[name] for name in ("q", "k", "v", "bias", "sinks")))
        dout = torch.zeros_like(out, dtype=local.q.dtype) if dout is None else materialized(dout)
        given = Cotangents(out, lse, dout, None if dlse is None else materialized(dlse).to(lse.dtype), needs)
        grads = Backward(call, ctx.link, local, given).gradients()
        return None, None, grads.dq, grads.dk, grads.dv, grads.dbias, None, grads.dsinks, None


def _parsed(q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, options: dict[str, Any]) -> tuple[Call, Local]:
    """The call and this rank's tensors; all ranks agree on it, or raise alike."""
    error: TilewiseError | None = None
    try:
        problem, local, backend = _described(q, k, v, plan, options)
    except TilewiseError as caught:
        error = caught
    if error is not None:
        _agree(plan, error, new=not plan.memory.get("agreed"))
        raise error
    device = local.q.device
    key = (problem, backend, device, None if local.bias is None else tuple(local.bias.shape[2:]))
    calls: dict[Any, Call] = plan.memory.setdefault("calls", {})
    _agree(plan, _facts(plan, problem, local, backend), new=key not in calls)
    plan.memory["agreed"] = True
    if key not in calls:
        calls[key] = Call(plan, problem, backend, device)
    return calls[key], local


def _agree(plan: ContextPlan, facts: dict[str, Any] | TilewiseError, *, new: bool) -> None:
    """Raise the same error on all ranks unless they agree: with gloo on every call, else on one that is new to the plan."""
    if plan.ranks == 1:
        return
    if torch.distributed.get_backend(plan.group) == "gloo":
        link = plan.memory.setdefault("agreement", Link(plan.group, plan.rank))
        new = not same(link, plan.ranks, facts)
    if new:
        agree(plan.group, facts)


def _facts(plan: ContextPlan, problem: Problem, local: Local, backend: str) -> dict[str, Any]:
    """What must be equal on all ranks."""
    bias = None if local.bias is None else "rows" if local.bias.shape[2] > 1 else "one row"
    names = ("dtype", "scale", "softcap", "dropout_p", "alibi", "sinks", "precision", "needs_grad")
    facts = {"the plan (problem, mask, lengths or shards)": plan.fingerprint}
    return facts | {name: getattr(problem, name) for name in names} | {
        "bias": bias,
        "backend": backend,
        "return_lse": problem.needs_lse,
        "device": problem.device,
        "tile": problem.tile,
    }


def _described(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, options: dict[str, Any]
) -> tuple[Problem, Local, str]:
    """The whole problem with the options of the call, and this rank's tensors; raises for what makes no sense."""
    check_keywords("attention", options, {**{one.name: one.default for one in parameters(BatchOptions)}, "return_lse": False})
    whole, packed = plan.problem, plan.lengths is not None
    if options.get("mask") is not None:
        raise ArgumentError("mask: the plan has it; make the plan from a Problem with this mask")
    backend = options.get("backend", "auto")
    dispatch.check_name(backend, "auto")
    q, k, v = autocast((q, k, v))
    layout = options.get("layout", "bhsd")
    if layout not in LAYOUTS or (packed and layout != "bhsd"):
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' or 'bshd'; packed tokens are (tokens, heads, dim)")
    check_tensors(q, k, v, *((3, "(tokens, heads, dim)") if packed else (4, LAYOUTS[layout])))
    if plan.ranks > 1:
        check_place(plan.group, q.device)
    if packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    elif layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _check_shard(plan, q, k, v)
    shape = MaskShape(whole.batch, whole.heads, q.shape[2], max(plan.lengths or (whole.seqlen_k,)))
    precision = options.get("precision", whole.precision)
    bias, alibi = split_bias(options.get("bias"), q, shape, packed, precision)
    _check_bias(plan, bias, q.shape[2], shape.seqlen_k)
    sinks = check_sinks(options.get("sinks"), q, whole.heads)
    _check_presence(whole, bias, alibi, sinks)
    dropout_p = unboxed(options.get("dropout_p", whole.dropout_p))
    seed = options.get("seed")
    local = Local(q, k, v, bias, alibi, sinks, make_seed(seed, q.device) if dropout_p and seed is not None else None)
    scale, deterministic = options.get("scale"), options.get("deterministic")
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in local)
    problem = replace(
        whole,
        scale=whole.scale if scale is None else unboxed(scale),
        softcap=unboxed(options.get("softcap", whole.softcap)),
        bias=None,
        alibi=alibi is not None,
        sinks=sinks is not None,
        dropout_p=dropout_p,
        precision=precision,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic),
        needs_grad=gradients,
        needs_lse=bool(options["return_lse"]),
        device=q.device.type,
        tile=tile_request(options.get("tile")) or whole.tile,
    )
    problem.check()
    check_kinds(Inputs(q, k, v, bias, alibi, sinks), ())
    return problem, Local(*(None if x is None else materialized(x) for x in local)), backend  # type: ignore[arg-type]


def _check_shard(plan: ContextPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the tensors are this rank's shard of the plan's problem."""
    whole, tokens = plan.problem, plan.local_tokens()
    if q.shape[2] != k.shape[2]:
        raise LayoutError(
            f"q has {q.shape[2]} tokens and k {k.shape[2]}; context parallelism is for self-attention, where they are the same "
            "tokens. Generation (a cache, or Sq ≠ Sk) runs without it: use tw.attention on one rank"
        )
    check_shapes(q.shape, k.shape, v.shape)
    if dtype_name(q) != whole.dtype:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, the plan is for {whole.dtype}; plan with dtype={dtype_name(q)!r}")
    batch = 1 if plan.lengths is not None else whole.batch
    for name, x, heads, dim in (
        *(("q", q, whole.heads, whole.head_dim), ("k", k, whole.kv_heads, whole.head_dim)),
        ("v", v, whole.kv_heads, whole.head_dim_v),
    ):
        want = (batch, heads, tokens, dim)
        if tuple(x.shape) != want:
            raise LayoutError(
                f"{name}: shape {tuple(x.shape)} as (batch, heads, tokens, dim), this rank's shard has {want}; "
                "pass plan.shard(x, dim) of the whole tensor"
            )


def _check_bias(plan: ContextPlan, bias: Tensor | None, rows: int, keys: int) -> None:
    if bias is None:
        return
    if bias.shape[2] not in (1, rows) or bias.shape[3] not in (1, keys) or (plan.lengths and bias.shape[0] != 1):
        want = f"(1 or batch, 1 or heads, 1 or {rows} rows of this rank, 1 or {keys} keys)"
        raise LayoutError(f"bias: shape {tuple(bias.shape)}, need {want}")
    if plan.heads > 1 and bias.shape[2] > 1:
        raise PlanError(
            "bias: ranks of this plan share heads, and would have to share the rows of the bias; plan from a Problem that "
            "has bias=, the shape of the whole bias"
        )
    if plan.heads == 1 and any(stage.returns for stage in plan.stages):
        raise PlanError(
            "bias: in this plan queries travel, and their bias would have to; plan from a Problem that has bias=, the shape "
            "of the whole bias"
        )


def _check_presence(whole: Problem, bias: Tensor | None, alibi: Tensor | None, sinks: Tensor | None) -> None:
    """What the plan's problem has must be given."""
    for name, wanted, given in (
        *(("bias", whole.bias is not None, bias), ("bias=alibi(slopes)", whole.alibi, alibi)),
        ("sinks", whole.sinks, sinks),
    ):
        if wanted and given is None:
            raise ArgumentError(f"{name}: the plan's problem has it, and this call does not; pass it")


def _common_seed(plan: ContextPlan, device: torch.device) -> Tensor:
    """A seed that rank 0 draws. It is drawn on every rank, so that all generators advance alike."""
    seed = make_seed(None, device)
    if plan.ranks > 1:
        torch.distributed.broadcast(seed, torch.distributed.get_global_rank(plan.group, 0), plan.group)
    return seed
