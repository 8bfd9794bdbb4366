"""The engine: no speed without correctness, records that say where they come from, contenders that mean the same."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tilewise.backends.base import Verdict
from tilewise.dispatch import REGISTRY
from tilewise.errors import ArgumentError
from tilewise.lab.bench import records
from tilewise.lab.bench.cases import Case, Tensors
from tilewise.lab.bench.engine import Record, Result, bind_run, geometric_means, measure, measure_all
from tilewise.lab.bench.overhead import null_backend
from tilewise.lab.bench.peers import PEERS, Contender, boolean_mask, contender, default_peers
from tilewise.lab.bench.suites import SUITES, suite
from tilewise.lab.bench.timing import Effort, Spread

CASE = Case("case", heads=2, seqlen=48, head_dim=16, mask="causal")
QUICK = Effort(seconds=0.0, least=2, most=2, sample=0.0)


def impostor(bind) -> Contender:
    return Contender("impostor", lambda case: Verdict(True), bind)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_wrong_result_gets_no_speed(value: float) -> None:
    wrong = impostor(lambda case, tensors: lambda q, k, v: torch.full_like(q, value))
    record = measure(CASE, [contender("tilewise"), wrong, PEERS["sdpa"]], QUICK)
    found = record.to_dict()["results"][1]
    assert found["status"] == "wrong" and found["seconds"] is None
    assert record.ratio is not None and record.right
    json.dumps(record.to_dict(), allow_nan=False)
    assert {r.contender for r in record.results if r.times} == {"tilewise", "sdpa"}


def test_no_ratio_against_a_wrong_peer() -> None:
    wrong = Contender("sdpa", lambda case: Verdict(True), lambda case, tensors: lambda q, k, v: q)
    record = measure(CASE, [contender("tilewise"), wrong], QUICK)
    assert record.ratio is None


def test_a_peer_that_computes_something_else_by_design_is_timed_and_not_judged() -> None:
    """The call without the feature, and SDPA's dropout, which draws its own numbers. Elsewhere both are judged."""
    for case, name in ((replace(CASE, alibi=True), "plain"), (replace(CASE, dropout_p=0.5), "sdpa")):
        record = measure(replace(case, against=(name,)), [contender("tilewise"), PEERS[name]], QUICK)
        ours, other = record.results
        assert ours.status == "ok" and other.status == "not judged" and other.times and other.judgement is None
        assert record.rival == name and record.ratio is not None and record.right
    for name in ("plain", "sdpa"):
        record = measure(CASE, [PEERS[name]], QUICK)
        assert record.results[0].status == "ok" and record.results[0].judgement is not None


@pytest.mark.parametrize("name", ["tilewise", "sdpa"])
def test_the_gradient_of_a_bias_is_part_of_a_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, mask="full", bias=(1, 2, 48, 48), passes="backward", bias_gradient=True)
    asked, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda out, leaves, *a, **k: asked.append(leaves) or grad(out, leaves, *a, **k))
    record = measure(case, [contender(name)], QUICK)
    assert record.results[0].status == "ok", record.results
    assert {len(leaves) for leaves in asked} == {4} and all(leaves[3].shape == (1, 2, 48, 48) for leaves in asked)


def test_failures_and_refusals_stay_in_the_record() -> None:
    def explode(case, tensors):
        raise RuntimeError("out of luck")

    record = measure(CASE, [impostor(explode), PEERS["sdpa-upcast"]], QUICK)
    reasons = [result.reasons[0] for result in record.results]
    assert "out of luck" in reasons[0] and "needs float16" in reasons[1]
    assert not any(result.times for result in record.results)


@pytest.mark.parametrize(("floor", "passed"), [(None, None), (1e-9, True), (1e9, False)])
def test_floors(floor: float | None, passed: bool | None) -> None:
    case = Case("case", heads=1, seqlen=32, head_dim=16, floor=floor)
    assert measure(case, [contender("tilewise"), PEERS["sdpa"]], QUICK).passed is passed


def test_a_case_may_say_whose_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.tiled.backend import backend

    monkeypatch.setattr("tilewise.api.call_cache._calls", {})  # a call that is cached does not ask again
    seen = []
    forward = type(backend).forward
    monkeypatch.setattr(type(backend), "forward", lambda self, *args: (seen.append(self.name), forward(self, *args))[1])
    record = measure(replace(CASE, backend="tiled"), [contender("tilewise"), PEERS["sdpa"]], QUICK)
    assert record.choice["backend"] == "tiled" and set(seen) == {"tiled"} and record.ratio is not None
    seen.clear()
    measure(replace(CASE, backend="tiled"), [contender("tilewise:reference")], QUICK)
    assert not seen, "a contender's own backend comes first"


def test_cases_of_equal_size_draw_the_same_numbers() -> None:
    one, other = replace(CASE, heads=2, seqlen=48).tensors(), replace(CASE, heads=4, seqlen=24).tensors()
    assert one.q.shape != other.q.shape and one.q.data_ptr() == other.q.data_ptr()
    assert torch.equal(one.v, torch.randn(3, 1, 2, 48, 16, generator=torch.Generator().manual_seed(0))[2])
    assert not torch.equal(one.q, CASE.tensors(seed=1).q)


def test_threads_are_set_for_the_case_and_given_back() -> None:
    seen = []
    before = torch.get_num_threads()
    spy = impostor(lambda case, tensors: lambda q, k, v: (seen.append(torch.get_num_threads()), q)[1])
    measure(Case("case", heads=1, seqlen=8, head_dim=8, threads=before + 1), [spy], QUICK)
    assert set(seen) == {before + 1} and torch.get_num_threads() == before


def test_documents_say_where_they_come_from(tmp_path: Path) -> None:
    record = measure(CASE, [contender("tilewise")], QUICK)
    document = records.document("mine", [record])
    assert document["machine"]["cores"] >= 1 and document["versions"]["torch"] == torch.__version__
    assert document["records"][0]["choice"]["backend"] in REGISTRY
    paths = [records.save(document, tmp_path) for _ in range(2)]
    assert len(set(paths)) == 2, "an existing record must not be overwritten"
    assert json.loads(paths[0].read_text(encoding="utf-8")) == json.loads(json.dumps(document))


@pytest.mark.parametrize("text", ["causal", "window(5)", "causal & window(7) | prefix(3)"])
def test_the_boolean_mask_is_the_mask(text: str) -> None:
    case = Case("case", heads=1, seqlen=100, kv_seqlen=130, head_dim=8, mask=text)
    q, k = torch.arange(100)[:, None] + 30, torch.arange(130)[None, :]
    want = {
        "causal": k <= q,
        "window(5)": (k <= q) & (k > q - 5),
        "causal & window(7) | prefix(3)": ((k <= q) & (k > q - 7)) | (k < 3),
    }[text]
    assert torch.equal(boolean_mask(case), want)


def test_every_case_of_every_suite_makes_sense() -> None:
    for name in SUITES:
        cases = suite(name).cases
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.words() and set(case.against) <= set(PEERS)
            assert case.features or "sdpa" in default_peers(case)
            assert case.aim is None or (case.floor is not None and case.floor <= case.aim)
        assert set(suite(name).means) <= {case.group for case in cases}
    with pytest.raises(ArgumentError, match="suite: got 'nope', need one of"):
        suite("nope")


def test_unknown_contenders_are_refused() -> None:
    with pytest.raises(ArgumentError, match="peer: got 'nobody'"):
        contender("nobody")


def test_the_null_backend_comes_and_goes() -> None:
    with null_backend() as name:
        assert name in REGISTRY
    assert name not in REGISTRY


def as_gpu_case(**changes) -> Case:
    return Case("gpu", heads=2, seqlen=32, head_dim=16, dtype="bfloat16", device="cuda", **changes)


def bshd_attention(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def contiguous(x):
    assert x.is_contiguous()
    return x


@pytest.fixture
def pretend_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for packages that need a GPU: right arithmetic, their signatures, (batch, sequence, heads, dim)."""
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_func = lambda q, k, v, causal=False: bshd_attention(q, k, v, causal)
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = lambda q, k, v, causal=False: (bshd_attention(*map(contiguous, (q, k, v)), causal), None)
    flash.__path__ = []  # FlashAttention-4 alone makes such a package too, without flash_attn_func
    assert "not installed" in PEERS["flash_attn"].supports(as_gpu_case()).reasons[0]
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    ops = types.ModuleType("xformers.ops")
    ops.LowerTriangularMask = type("LowerTriangularMask", (), {})
    ops.memory_efficient_attention = lambda q, k, v, attn_bias=None: bshd_attention(q, k, v, attn_bias is not None)
    xformers = types.ModuleType("xformers")
    xformers.ops = ops
    for module in (flash, interface, cute, xformers, ops):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("peer", ["flash_attn", "fa4", "xformers"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_installed_peers_are_called_as_they_want(peer: str, layout: str, mask: str, pretend_peers: None) -> None:
    case = as_gpu_case(mask=mask, layout=layout)
    assert PEERS[peer].supports(case).ok
    shape = (1, 2, 32, 16) if layout == "bhsd" else (1, 32, 2, 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    want = bshd_attention(*(x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)), mask == "causal")
    got = bind_run(case, PEERS[peer], Tensors(q, k, v, q))().out
    torch.testing.assert_close(got, want.transpose(1, 2) if layout == "bhsd" else want, rtol=0, atol=0)


@pytest.mark.parametrize("peer", ["flash_attn", "fa4", "xformers"])
def test_peers_decline_what_they_cannot(peer: str, pretend_peers: None) -> None:
    assert not PEERS[peer].supports(as_gpu_case(mask="causal | prefix(4)")).ok
    assert not PEERS[peer].supports(as_gpu_case(dropout_p=0.5)).ok
    assert PEERS[peer].supports(as_gpu_case(softcap=3.0, sinks=True)).ok is (peer == "fa4")
    assert PEERS[peer].supports(as_gpu_case(mask="causal & window(4)")).ok is (peer == "fa4")
    on_cpu = PEERS[peer].supports(Case("cpu", dtype="float32"))
    assert not on_cpu.ok and any("CUDA" in reason for reason in on_cpu.reasons)


def test_the_ratio_is_to_the_fastest_rival() -> None:
    import time

    def slow(seconds):
        def bind(case, tensors):
            right = PEERS["standard"].bind(case, tensors)
            return lambda q, k, v: (time.sleep(seconds), right(q, k, v))[1]

        return bind

    always = lambda case: Verdict(True)  # noqa: E731
    rivals = [Contender(f"rival{i}", always, slow(seconds)) for i, seconds in enumerate((0.05, 0.01, 0.1))]
    case = Case("case", heads=1, seqlen=16, head_dim=8, against=("rival0", "rival1", "rival2"))
    record = measure(case, [contender("tilewise"), *rivals], QUICK)
    assert record.rival == "rival1"


def test_backward_alone_gives_the_gradients_of_training() -> None:
    sizes = {"heads": 2, "seqlen": 24, "head_dim": 8, "mask": "causal"}
    training, backward = (Case(passes, passes=passes, **sizes) for passes in ("training", "backward"))
    tensors = training.tensors()
    runs = [bind_run(case, PEERS["standard"], tensors) for case in (training, backward)]
    for _ in range(2):  # the graph is kept: it can be timed more than once
        for got, want in zip(runs[1]().grads, runs[0]().grads, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_geometric_means_are_by_group_and_need_every_case() -> None:
    def record(group: str, value: float | None) -> Record:
        found = Record(Case("case", group=group), [Result("tilewise")])
        found.ratio = Spread(value, value, value, 1) if value else None
        return found

    records = [record("a", 2.0), record("a", 8.0), record("b", 3.0), record("b", None), record("", 9.0)]
    a, b = geometric_means(records, {"a": 4.5, "b": 1.0, "absent": 1.0})
    assert (a.group, a.ratio, a.passed) == ("a", pytest.approx(4.0), False)
    assert (b.group, b.ratio, b.passed) == ("b", None, False)


def test_peers_asked_for_take_the_place_of_a_list_of_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was not asked for is not timed, nor is a promise about it judged; plain SDPA stays the measure."""
    monkeypatch.setattr("tilewise.lab.bench.engine.measure", lambda case, contenders, *_: [one.name for one in contenders])
    own = replace(CASE, name="own", against=("fa4", "sdpa-cudnn"))
    assert measure_all([own, CASE], ["sdpa-cudnn"], QUICK) == [["tilewise", "sdpa-cudnn"], ["tilewise", "sdpa", "sdpa-cudnn"]]
    assert measure_all([own], None, QUICK) == [["tilewise", "fa4", "sdpa-cudnn", "sdpa"]]
    results = [Result("tilewise"), Result("standard")]
    for rivals, promised in ((("fa4",), None), (("fa4", "standard"), False)):
        case = replace(CASE, against=rivals, floor=1.0, accurate=True)
        assert Record(case, results).passed is promised
