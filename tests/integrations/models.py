"""Real transformers models at tiny random configurations, and how their numbers are compared.

The criterion. A model is run three times on the same (quantised) weights: `eager` in float64, `eager` in the dtype under test and
`tilewise` in that dtype. The float64 run is float64 throughout: a mode turns every float32 a model asks for by name into
float64. Both others commit roundings of the same size, at the same places or fewer, so their errors follow laws of the same
scale. Over all elements together (thousands) the root mean squares concentrate, and tilewise's must not exceed twice
eager's; for single tensors, whose few and correlated errors make their root mean square itself a matter of chance, not four
times. One unit roundoff of the size of all gradients together is allowed on top: some gradients are zero in exact
arithmetic (that of a key's bias), and what is left of them is the rounding of the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALL_TOGETHER, ONE_TENSOR = 2.0, 4.0
LENGTH, PADDING = 11, 3
NEW = 12  # tokens generated


class Double(TorchFunctionMode):
    """float64 where a model asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        args, kwargs = tuple(map(wide, args)), {k: wide(v) for k, v in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


class Case(NamedTuple):
    """A model and its inputs. `real` marks the outputs that count: rows of pure padding see no key, and have no meaning."""

    name: str
    make: Callable[[], Any]
    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    real: Callable[[dict[str, Tensor]], Tensor | None] = lambda inputs: inputs.get("attention_mask")
    generates: bool = True

    def build(self, device: str, dtype: torch.dtype) -> Any:
        """The model: always the same weights, large enough that attention matters, rounded to the dtype."""
        torch.manual_seed(0)
        return self.make().to(device=device, dtype=dtype).eval()

    def swappable(self) -> bool:
        """Whether this release of transformers lets the model's attention be chosen; T5 joined late."""
        return bool(type(self.build("cpu", torch.float32))._can_set_attn_implementation())

    def batch(self, device: str) -> dict[str, Tensor]:
        return {k: v.to(device) for k, v in self.inputs(torch.Generator().manual_seed(1)).items()}


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a model of random weights that ties them repeats the last token for ever
}
DECODER = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None}
TWO_KINDS = ["sliding_attention", "full_attention"]


def text(g: torch.Generator) -> dict[str, Tensor]:
    """Two sequences, the first padded on the left."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :PADDING] = 0
    return {"input_ids": torch.randint(2, 64, (2, LENGTH), generator=g), "attention_mask": mask}


def right_padded(g: torch.Generator) -> dict[str, Tensor]:
    batch = text(g)
    return {**batch, "attention_mask": batch["attention_mask"].flip(-1)}


def text_to_text(g: torch.Generator) -> dict[str, Tensor]:
    return {**right_padded(g), "decoder_input_ids": torch.randint(2, 64, (2, 7), generator=g)}


def image(g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}


def sound(g: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, 8, 24, generator=g),
        "decoder_input_ids": torch.randint(2, 64, (2, 7), generator=g),
    }


def causal_lm(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**DECODER, **options})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        if (
            hasattr(model, "set_experts_implementation") and name == "GptOss"
        ):  # the grouped matrix product of the experts has no float64
            model.set_experts_implementation("eager")
        return model

    return make


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**COMMON, max_position_embeddings=32))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():  # T5's own initial scale leaves attention almost uniform
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))  # T5 ties it whatever its configuration says
    return model


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        initializer_range=0.2,
        num_labels=8,
    )
    return transformers.ViTForImageClassification(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=32,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def nothing_padded(inputs: dict[str, Tensor]) -> None:
    return None


CASES = [
    Case("llama", causal_lm("Llama"), text),
    Case("mistral", causal_lm("Mistral", sliding_window=4, head_dim=8), text),
    Case(
        "qwen3", causal_lm("Qwen3", head_dim=8, sliding_window=4, layer_types=TWO_KINDS, use_sliding_window=True), text
    ),
    Case(
        "gemma2",
        causal_lm("Gemma2", head_dim=8, sliding_window=4, attn_logit_softcapping=3.0, layer_types=TWO_KINDS),
        text,
    ),
    Case(
        "gpt_oss",
        causal_lm(
            "GptOss", head_dim=8, sliding_window=4, layer_types=TWO_KINDS, num_local_experts=2, num_experts_per_tok=1
        ),
        text,
    ),
    Case("bert", bert, right_padded, generates=False),
    Case("t5", t5, text_to_text, nothing_padded),
    Case("vit", vit, image, nothing_padded, generates=False),
    Case("whisper", whisper, sound, nothing_padded),
]


class Numbers(NamedTuple):
    """What a run of a model gives: logits that count, and the gradient of every parameter."""

    logits: Tensor
    gradients: dict[str, Tensor]


def run(model: Any, inputs: dict[str, Tensor], real: Tensor | None) -> Numbers:
    """Forward, and backward from a fixed random cotangent."""
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    logits = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}).logits
    if real is not None:
        logits = logits[real.bool()]
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    logits.backward(cotangent)
    gradients = {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}
    return Numbers(logits.detach().double(), gradients)


def run_three(case: Case, device: str, dtype: torch.dtype) -> tuple[Numbers, Numbers, Numbers]:
    """tilewise, eager, and eager in float64."""
    model, inputs = case.build(device, dtype), case.batch(device)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    real = case.real(inputs)
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("eager")
    with Double():
        exact = run(wide, inputs, real)
    model.set_attn_implementation("eager")
    eager = run(model, inputs, real)
    model.set_attn_implementation("tilewise")
    return run(model, inputs, real), eager, exact


def size(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def excesses(ours: Numbers, eager: Numbers, exact: Numbers, u: float) -> list[str]:
    """Where tilewise is further from float64 than the criterion above allows."""
    found = []

    def hold(name: str, a: Tensor, b: Tensor, c: Tensor, factor: float, scale: float) -> None:
        error, peer = size(a - c), size(b - c)
        if not error <= factor * peer + u * scale:
            found.append(f"{name}: error {error:.3g}, eager's {peer:.3g}, size {size(c):.3g}")

    hold("logits", ours.logits, eager.logits, exact.logits, ALL_TOGETHER, size(exact.logits))
    found += [f"{name}: no gradient" for name in exact.gradients.keys() ^ ours.gradients.keys()]
    if found:
        return found
    a, b, c = (torch.cat([g.flatten() for g in n.gradients.values()]) for n in (ours, eager, exact))
    hold("all gradients", a, b, c, ALL_TOGETHER, size(c))
    for name in exact.gradients:
        hold(name, ours.gradients[name], eager.gradients[name], exact.gradients[name], ONE_TENSOR, size(c))
    return found


def tokens(
    model: Any, inputs: dict[str, Tensor], implementation: str, cache: str | None, *, compiled: bool = False
) -> Tensor:
    """The sequences greedy `generate` gives, prompt included."""
    model.set_attn_implementation(implementation)
    prompt = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    done = model.generate(
        **prompt,
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=not compiled,
        return_dict_in_generate=True,  # without it Whisper leaves out the first token
    )
    return done.sequences


class Lag(NamedTuple):
    """How far the tokens tilewise chose are behind the best, how far they may be, and how large logits are."""

    most: float
    slack: float
    size: float

    @property
    def ok(self) -> bool:
        """A token picked blindly among 64 lags by √(2 ln 64) ≈ 2.9 sizes."""
        return self.most <= self.slack < 2 * self.size


def lag(case: Case, cache: str | None, device: str, dtype: torch.dtype, *, compiled: bool = False) -> Lag:
    """In 16 bits near ties fall either way, so tokens cannot be compared one by one.

    Given the same tokens before it, `eager` must rank each chosen token within rounding of its best: two logits, each off by
    as much in eager as in tilewise.
    """
    model, inputs = case.build(device, dtype), case.batch(device)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    sequences = tokens(model, inputs, "tilewise", cache, compiled=compiled)
    before = dict(inputs)
    if "decoder_input_ids" in inputs:
        before["decoder_input_ids"] = sequences[:, :-1]
    else:
        before["input_ids"] = sequences[:, :-1]
        grown = sequences.shape[1] - 1 - LENGTH
        before["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, grown), value=1)
    model.set_attn_implementation("eager")
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        eager = model(**before).logits[:, -NEW:].double()
        with Double():
            exact = wide(**{k: v.double() if v.is_floating_point() else v for k, v in before.items()}).logits[:, -NEW:]
    behind = eager.amax(-1) - eager.gather(-1, sequences[:, -NEW:, None]).squeeze(-1)
    return Lag(float(behind.max()), 4 * float((eager - exact).abs().max()), size(exact))
