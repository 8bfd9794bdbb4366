"""`use_context_parallel(model, group)`: the ranks of a group divide the tokens of every sequence among them.

The model is called as before, with the whole batch on every rank. A hook before its forward keeps this rank's tokens of the
inputs; each layer says whether it has a sliding window, as it does for flash attention, and attends over the tokens of all
ranks by a plan of its own mask; a hook after the forward makes the loss that of the whole batch. Plans travel to the layers as
a keyword argument, so that activation checkpointing finds them again. Nothing of them is in the model's state.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import distributed
from tilewise.distributed.labels import next_labels
from tilewise.distributed.loss import average_gradients, sum_over_ranks
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.transformers.attention import refuse_unserved
from tilewise.integrations.transformers.context_refusal import check_call, check_model, refuse_generation
from tilewise.integrations.transformers.context_tokens import Tokens, check_positions, read_tokens
from tilewise.integrations.transformers.refusal import refuse
from tilewise.integrations.transformers.registry import registries
from tilewise.masks import Mask, causal, window
from tilewise.problem import Problem

NAME = "tilewise_context_parallel"
ARGUMENT = "context_parallel"
"""The keyword by which a forward's plans reach its layers."""
KEPT = 32
"""Plans that are kept: those of the latest shapes, for every kind of layer."""


def use_context_parallel(model: Any, group: Any = None, *, shards: str = "balanced") -> ContextParallel:
    """Divide the tokens of a transformers model's sequences over the ranks of a group.

    Every rank calls the model with the same whole batch, and gets the loss of the whole batch, and the logits and hidden states
    of its own tokens. Gradients averaged over the ranks, as DDP and FSDP do, are those of one machine.

    model: a causal language model, or one without a head, whose layers have full or sliding-window attention.
    group: a process group or a DeviceMesh of one dimension; None for the default group.
    shards: "balanced", "contiguous", "head_tail" or "zigzag", as in `tilewise.distributed.plan`.

    Returns a ContextParallel: `remove()` it, or use it in a `with` statement, to give the model back as it was.

    >>> parallel = use_context_parallel(model, group)
    >>> loss = model(input_ids=ids, labels=ids).loss            # ids (B, S) whole on every rank; the same loss on every rank
    >>> loss.backward()
    >>> parallel.average_gradients()                            # unless DDP or FSDP does
    """
    attention, _, base = registries()
    if not isinstance(model, base):
        raise ArgumentError(f"model: got {type(model).__name__}, need a transformers PreTrainedModel")
    if model.config._attn_implementation == NAME:
        raise ArgumentError("model: is under context parallelism already; call remove() of what use_context_parallel returned")
    check_model(model)
    refuse(model, NAME)
    attention.register(NAME, attention_function)
    return ContextParallel(model, _process_group(group), shards)


class Step:
    """One forward, as its layers see it. FSDP searches tuples and dataclasses among a layer's arguments: this is neither.

    plan: that of the widest mask, by which inputs are divided.
    seed: of dropout, the same on every rank.
    """

    def __init__(self, parallel: ContextParallel, tokens: Tokens, plan: distributed.ContextPlan, seed: int) -> None:
        self.parallel, self.tokens, self.plan, self.seed = parallel, tokens, plan, seed


@dataclass(frozen=True)
class _Layer:
    """What a plan depends on beside the tokens."""

    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str

    @property
    def mask(self) -> Mask:
        return causal() if self.window is None else causal() & window(self.window)


class ContextParallel:
    """A model under context parallelism, made by `use_context_parallel`."""

    def __init__(self, model: Any, group: Any, shards: str) -> None:
        self.model, self.group, self.shards = model, group, shards
        self._plans: OrderedDict[Any, distributed.ContextPlan] = OrderedDict()
        self._last: Step | None = None
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ArgumentError(f"model: {type(model).__name__} does not let its attention be chosen")
        self._hooks = [
            model.register_forward_pre_hook(self._divide, with_kwargs=True),
            model.register_forward_hook(self._whole_loss, with_kwargs=True),
        ]
        if hasattr(model, "generate"):
            model.generate = refuse_generation

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the model back as it was. Doing it again changes nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.__dict__.pop("generate", None)
        self.model.set_attn_implementation(self._before)
        self._plans.clear()

    def average_gradients(self) -> None:
        """Average the model's gradients over the ranks, where neither DDP nor FSDP does."""
        average_gradients(self.model.parameters(), self.group)

    def unshard(self, x: Tensor) -> Tensor:
        """The whole of an output of the last forward: from this rank's tokens (B or 1, tokens, …) to (batch, length, …).

        Padding is 0. Differentiable; every rank calls it.

        >>> logits = parallel.unshard(model(input_ids=ids).logits)
        """
        if self._last is None:
            raise ArgumentError("unshard: the model has not been called yet; its outputs are what can be made whole")
        return self._last.tokens.unpack(self._last.plan.unshard(x, 1))

    def plans(self) -> dict[int | None, distributed.ContextPlan]:
        """The plans of the last forward by the window of the layers they serve, None for layers that see everything before.

        >>> print(parallel.plans()[None])
        """
        if self._last is None:
            return {}
        return {layer.window: made for (tokens, layer), made in self._plans.items() if tokens == self._last.tokens[:3]}

    def _divide(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Before a forward: this rank's tokens of every argument."""
        inputs = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
        check_call(inputs)
        name = "input_ids" if inputs.get("input_ids") is not None else "inputs_embeds"
        ids = inputs[name]
        if ids.ndim != (2 if name == "input_ids" else 3) or not ids.shape[0] * ids.shape[1]:
            want = "(batch, tokens)" if name == "input_ids" else "(batch, tokens, hidden)"
            raise LayoutError(f"{name}: shape {tuple(ids.shape)}, need {want} of at least one token")
        batch, length = ids.shape[:2]
        tokens = read_tokens(batch, length, inputs)
        seed = _agree(self.group, tokens, inputs, ids.device)
        shared = self.plan_for(tokens, self._widest(), self.shards)
        step = self._last = Step(self, tokens, shared, seed)

        def own(x: Tensor) -> Tensor:
            return shared.shard(tokens.pack(x), 1)

        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=ids.device)[None]
        check_positions(positions, batch, length)
        divided = {name: own(ids), "position_ids": own(positions), "use_cache": False, ARGUMENT: step}
        if inputs.get("labels") is not None or inputs.get("shift_labels") is not None:
            divided |= self._targets(tokens, shared, inputs)
        for name in ("output_hidden_states", "return_dict", "ignore_index"):
            if inputs.get(name) is not None:
                divided[name] = inputs[name]
        return (), divided

    def _targets(self, tokens: Tokens, shared: distributed.ContextPlan, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's labels of the next tokens, and how many labels all ranks have."""
        ignored = inputs.get("ignore_index", -100)
        shifted = inputs.get("shift_labels")
        name = "labels" if shifted is None else "shift_labels"
        if tuple(inputs[name].shape) != (tokens.batch, tokens.length):
            raise LayoutError(
                f"{name}: shape {tuple(inputs[name].shape)}, need {(tokens.batch, tokens.length)}, as the tokens have it"
            )
        whole = tokens.pack(inputs[name])
        if shifted is None:
            whole = next_labels(whole, tokens.lengths or (tokens.length,), 1, ignored)
        counted = inputs.get("num_items_in_batch")
        targets = shared.shard(whole, 1)
        return {
            "labels": targets,
            "shift_labels": targets,
            "num_items_in_batch": (whole != ignored).sum() if counted is None else counted,
        }

    def _whole_loss(self, model: Any, args: Any, inputs: dict[str, Any], output: Any) -> Any:
        """After a forward: the loss of all ranks."""
        if inputs.get("labels") is None:
            return output
        if isinstance(output, tuple):
            return (sum_over_ranks(output[0], self.group), *output[1:])
        output.loss = sum_over_ranks(output.loss, self.group)
        return output

    def _widest(self) -> _Layer:
        """The layers that see most: by their mask tokens are divided."""
        config = self.model.config
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        windows = layer_windows(config)
        widest = None if None in windows else max(n for n in windows if n is not None)
        dtype = str(self.model.dtype).removeprefix("torch.")
        return _Layer(widest, heads, getattr(config, "num_key_value_heads", None) or heads, dim, dim, dtype)

    def plan_for(self, tokens: Tokens, layer: _Layer, shards: Any) -> distributed.ContextPlan:
        """The plan of one kind of layer, made once for the tokens' lengths."""
        key = tokens[:3], layer
        found = self._plans.get(key)
        if found is None:
            problem = Problem.of(
                heads=layer.heads,
                kv_heads=layer.kv_heads,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim_v,
                batch=tokens.batch if tokens.lengths is None else 1,
                seqlen=tokens.length if tokens.lengths is None else sum(tokens.lengths),
                dtype=layer.dtype,
                mask=layer.mask,
                needs_grad=True,
            )
            found = self._plans[key] = distributed.plan(problem, self.group, lengths=tokens.lengths, shards=shards)
            if len(self._plans) > KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found


def layer_windows(config: Any) -> set[int | None]:
    """The windows of a model's layers; None for a layer that sees everything before."""
    size, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds:
        return {size if kind == "sliding_attention" else None for kind in kinds}
    return {size}


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the tokens of all ranks; q, k, v are those of this rank, (B, H, tokens, D)."""
    step = features.get(ARGUMENT)
    if not isinstance(step, Step):
        raise ArgumentError(
            f"{type(module).__name__}: was called without the plans of context parallelism; call the model that was given to "
            "use_context_parallel, whose layers must hand on their keyword arguments"
        )
    refuse_unserved(module, features)
    _check_layer(module, attention_mask, is_causal, features)
    if isinstance(scaling, Tensor):  # a learned scale: its gradient flows through q
        query, scaling = query * scaling, 1.0
    layer = _Layer(
        window=features.get("sliding_window"),
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        dtype=str(query.dtype).removeprefix("torch."),
    )
    plan = step.parallel.plan_for(step.tokens, layer, step.plan.shards)
    packed = step.tokens.lengths is not None
    q, k, v = (x[0].transpose(0, 1) if packed else x for x in (query, key, value))
    out = distributed.attention(
        *(q, k, v, plan),
        scale=scaling,
        softcap=features.get("softcap") or 0.0,
        sinks=features.get("s_aux"),
        dropout_p=dropout,
        seed=(step.seed + getattr(module, "layer_idx", 0)) % 2**62 if dropout else None,
        deterministic=features.get("deterministic"),
    )
    return (out[None] if packed else out.transpose(1, 2)).contiguous(), None


def _check_layer(module: Any, attention_mask: Any, is_causal: bool | None, features: dict[str, Any]) -> None:
    """Raise where a layer asks for another mask than the model's configuration promised."""
    who, window_, config = type(module).__name__, features.get("sliding_window"), module.config
    if attention_mask is not None or features.get("position_bias") is not None:
        raise ArgumentError(f"attention_mask: {who} makes a mask or a bias of its own, which context parallelism has no plan for")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ArgumentError(f"is_causal: {who} is not causal, need layers that see no later token")
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    promised = layer_windows(config)
    if kinds and number is not None:
        promised = {getattr(config, "sliding_window", None) if kinds[number] == "sliding_attention" else None}
    if window_ not in promised:
        raise ArgumentError(
            f"sliding_window: {who} {number} asks for {window_}, the configuration says {sorted(promised, key=str)}; context "
            "parallelism needs layers that tell their window to the attention function"
        )


def _agree(group: Any, tokens: Tokens, inputs: dict[str, Any], device: torch.device) -> int:
    """Raise on every rank unless all were given the same batch; else a number drawn by the first rank, for dropout.

    One small exchange before each forward. It waits for the device, and saves a rank from waiting for ever for another.
    """
    facts = [tokens.batch, tokens.length, crc32(repr(tokens.lengths).encode())]
    facts += [_checksum(inputs.get(name)) for name in ("input_ids", "position_ids", "attention_mask", "labels", "shift_labels")]
    facts.append(int(torch.randint(2**62, ())))
    own = torch.tensor(facts, device=device if dist.get_backend(group) == "nccl" else "cpu")
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    rows = [row.tolist() for row in every]
    others = [rank for rank, row in enumerate(rows) if row[:-1] != rows[0][:-1]]
    if others:
        shapes = ", ".join(f"{rows[rank][0]} × {rows[rank][1]} on rank {rank}" for rank in (0, *others[:4]))
        raise ArgumentError(
            f"input_ids: ranks {others} hold another batch than rank 0, need the same whole batch on every rank of the group; "
            f"batch × tokens are {shapes}. Let the sampler count groups, not ranks"
        )
    return int(rows[0][-1])


def _checksum(x: Any) -> int:
    """Of the integers of a tensor, in their order; 0 for anything else."""
    if not isinstance(x, Tensor) or x.is_floating_point():
        return 0
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 0x9E3779B1
    return int((x.detach().flatten().to(torch.int64) * weights).sum())


def _process_group(group: Any) -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "group: torch.distributed has no process group; start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if group is not None and hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ArgumentError(f"group: a mesh of {group.ndim} dimensions, need one, such as mesh['cp']")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ArgumentError("group: this process is not in it; call use_context_parallel with the group that holds this rank")
    return group
