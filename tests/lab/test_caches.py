"""Cases over caches: what each contender reads, that a wrong result gets no speed, and peers that are called as they want."""

from __future__ import annotations

import gc
import json
import sys
import types
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.backends.base import Verdict
from tilewise.lab.bench import cache_peers, caches
from tilewise.lab.bench.cache_suites import CELLS, kv_bytes
from tilewise.lab.bench.caches import CacheTensors
from tilewise.lab.bench.cases import Cache, Case
from tilewise.lab.bench.engine import Record, Result, measure, measure_all
from tilewise.lab.bench.peers import PEERS, Contender, contender
from tilewise.lab.bench.suites import suite
from tilewise.lab.bench.timing import Effort, Spread

SIZES: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "seqlen": 1, "kv_seqlen": 96, "mask": "causal"}
CASE = Case("case", **SIZES, against=("contiguous",), cache=Cache())
QUICK = Effort(seconds=0.0, least=2, most=2, sample=0.0)
GIB = 2**30


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    """A few caches take turns; nothing is kept after a test."""
    monkeypatch.setattr(caches, "COLD", {"cpu": 2**18, "cuda": 2**31})
    yield
    caches.forget_pools()


def over(**changes: Any) -> Case:
    names = Cache.__dataclass_fields__
    cache = replace(CASE.cache, **{name: x for name, x in changes.items() if name in names})
    return replace(CASE, cache=cache, **{name: x for name, x in changes.items() if name not in names})


OPTIONS = [
    {"page": 16}, {"page": 64}, {"page": 7}, {"page": 0}, {"in_order": True}, {"heads_first": True}, {"mixed": True},
    {"page": 0, "mixed": True}, {"page": 0, "heads_first": True},
    {"stored": "int8"}, {"stored": "float8_e4m3fn"}, {"stored": "int8", "heads_first": True}, {"new": True}, {"invariant": True},
    {"shared": 64, "kv_seqlen": 352, "plan": True}, {"shared": 256, "kv_seqlen": 352, "plan": True}, {"seqlen": 9, "new": True},
    {"dtype": "bfloat16"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_form_is_measured_and_right(options: dict[str, Any]) -> None:
    case = over(**options, against=("plain",))
    record = measure(case, [contender(name) for name in ("tilewise", "plain", "contiguous", "tilewise:tiled")], QUICK)
    assert [result.status for result in record.results] == ["ok"] * 4, record.results
    assert all(result.judgement.checked == 1.0 and result.rate for result in record.results)
    assert record.ratio is not None and record.rival == "plain" and record.choice["backend"] == "cpu"
    json.dumps(record.to_dict(), allow_nan=False)


def impostor(call) -> Contender:
    return Contender("impostor", lambda case: Verdict(True), lambda case, given: lambda copy: call(case, given))


@pytest.mark.parametrize("wrong", ["zeros", "nan", "shape", "another cache", "one token less", "unrotated"])
def test_a_wrong_result_gets_no_speed(wrong: str) -> None:
    case = over(new=wrong == "unrotated")

    def call(case: Case, given: CacheTensors) -> torch.Tensor:
        first, second, *_ = given.caches(case)
        if wrong == "another cache":
            return tw.attention_cached(given.q, second)
        if wrong == "one token less":
            less = tw.KVCache(first.pages._replace(lengths=first.lengths - 1))
            return tw.attention_cached(given.q, less)
        if wrong == "unrotated":
            return tw.attention_cached(given.q, first, new=given.new)
        right = tw.attention_cached(given.q, first)
        return {"zeros": right * 0, "nan": right.index_fill(2, torch.tensor(3), float("nan")), "shape": right[:, :, :3]}[wrong]

    record = measure(case, [contender("tilewise"), impostor(call)], QUICK)
    assert [result.status for result in record.results] == ["ok", "wrong"] and record.results[1].times is None


def test_caches_take_turns_over_other_bytes() -> None:
    """Each page belongs to one sequence of one cache, at a random place or in order."""
    for case in (CASE, over(page=7), over(mixed=True), over(shared=64, kv_seqlen=352, plan=True)):
        tables, lengths = caches.tables_of(case), caches.lengths_of(case)
        copies, page, shared = caches.copies_of(case), case.cache.page, case.cache.shared // case.cache.page
        assert copies > 1 and tables.shape[:2] == (copies, 3)
        owned = [tables[c, b, shared if b else 0 : -(-n // page)] for c in range(copies) for b, n in enumerate(lengths)]
        pages = torch.cat(owned)
        assert sorted(pages.tolist()) == list(range(caches.tokens_held(case) // page)), "none twice, none unused"
        assert (tables[:, 1:, :shared] == tables[:, :1, :shared]).all()
        assert not torch.equal(pages, pages.sort().values)
    ordered = caches.tables_of(over(in_order=True))
    assert torch.equal(ordered.flatten(), torch.arange(ordered.numel(), dtype=torch.int32))
    seen: list[int] = []
    turns = caches.Turns(CASE, lambda copy: torch.tensor(seen.append(copy) or 0.0))
    for _ in range(2 * caches.copies_of(CASE)):
        turns()
    assert seen == list(range(caches.copies_of(CASE))) * 2


def test_a_replay_is_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a graph is divided by the calls in it."""
    runs = []
    monkeypatch.setattr(caches, "captured", lambda call, copies: lambda: [runs.append(call(copy)) for copy in range(copies)])
    case = over(graph=True, device="cuda", kv_seqlen=2**18)
    copies = caches.copies_of(case)
    turns = caches.Turns(case, lambda copy: copy)
    asked: list[int] = []

    def clock(run, number):
        asked.append(number)
        run()
        return 8.0

    assert turns.calls == copies > 1 and turns.timer(clock)(3 * copies - 1) == 8.0 / copies
    assert asked == [3] and runs == list(range(copies))


def test_a_graph_is_warmed_up_and_must_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA's graphs, whose replay does nothing: all caches are seen before the capture, each once in it."""
    from contextlib import nullcontext

    calls: list[int] = []
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda one: nullcontext(),
        "synchronize": lambda: None, "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": lambda one: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    run = caches.captured(lambda copy: torch.full((2,), float(calls.append(copy) or copy)), 3)
    assert calls == [0, 1, 2, 0, 0, 1, 2] and run().isnan().all()

    class Owner:
        """Of what a graph reads."""

        def __call__(self, copy: int) -> torch.Tensor:
            return torch.zeros(1)

    owner = Owner()
    alive, run = weakref.ref(owner), caches.captured(owner, 1)
    del owner
    gc.collect()
    assert alive() is not None
    del run
    gc.collect()
    assert alive() is None


def test_the_bytes_of_the_gpu_suite() -> None:
    """What is read and held, of every case and every form of it, without a GPU."""
    cells = [case for case in suite("cache-gpu").cases if case.name.startswith("decode/16")]
    assert len(cells) == len(CELLS) == 54
    for case, cell in zip(cells, CELLS, strict=True):
        assert caches.bytes_read(case) == kv_bytes(cell) <= 30e9
        assert (case.rate is not None) is (kv_bytes(cell) >= 256e6)
        assert case.floor == 0.98 and case.least == (("contiguous", 0.97),) and case.cache.graph
    assert {(batch, keys) for batch, *_, keys in CELLS} >= {(1, 1024), (256, 8192), (16, 131072), (256, 131072)}
    for case in suite("cache-gpu").cases:
        for name in ("tilewise", *case.rivals):
            form = contender(name).form(case)
            copies, read = caches.copies_of(form), caches.bytes_read(form)
            problem = form.problem()
            token = problem.kv_heads * 2 * problem.head_dim * (1 if form.cache.stored else 2)
            assert copies * read >= 2**28, "L2 is cold"
            assert caches.tokens_held(form) * token <= 32e9
    by_name = {case.name: case for case in suite("cache-gpu").cases}
    int8, shared = by_name["int8/16 64×32/8×8192"], by_name["shared/16 64×32/8×33024"]
    assert caches.bytes_read(cache_peers.plain(int8)) == 2 * caches.bytes_read(int8) == 2 * GIB
    assert caches.bytes_read(cache_peers.unshared(shared)) / caches.bytes_read(shared) == 64 * 33024 / (32768 + 64 * 256)
    assert shared.floor == 10.0 and int8.floor == 1.7


def shrunk(case: Case) -> Case:
    """A case of the GPU's suite, small and on the CPU."""
    shared = 256 if case.cache.shared else 0
    sizes = {"batch": min(case.batch, 2), "kv_seqlen": 320, "seqlen": min(case.seqlen, 20), "head_dim": 16}
    return replace(case, **sizes, device="cpu", dtype="float32", cache=replace(case.cache, shared=shared))


def test_the_gpu_suite_makes_sense_in_small() -> None:
    """Each kind of case with those of its contenders that a CPU has; the others say why not."""
    kinds = {case.name.partition(" ")[0]: case for case in suite("cache-gpu").cases}
    assert len(kinds) == 15
    for case in map(shrunk, kinds.values()):
        record = measure(case, [contender(name) for name in dict.fromkeys(("tilewise", *case.rivals))], QUICK)
        for result in record.results:
            assert result.status == "ok" or (result.status == "not run" and result.reasons), result
        assert record.right


def test_a_tiny_suite_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = [replace(case, **{**SIZES, "heads": case.heads, "kv_heads": case.kv_heads}) for case in suite("cache").cases]
    records = measure_all([tiny[0], tiny[-1]], None, QUICK)
    assert [[result.contender for result in record.results] for record in records] == [
        ["tilewise", "contiguous"], ["tilewise", "plain"],
    ]  # fmt: skip
    assert all(result.status == "ok" for record in records for result in record.results)
    found = records[0].to_dict()
    assert found["case"]["cache"]["page"] == 16 and found["results"][0]["bytes"] and found["results"][0]["rate"]
    assert not caches._pools, "memory is given back"
    with pytest.raises(tw.errors.ArgumentError, match="cases over a cache run in this process alone"):
        measure_all([CASE], None, QUICK, against=[Path()])


def test_promises_beside_each_contender_and_of_a_rate() -> None:
    results = [Result("tilewise", bytes=8, times=Spread(2.0, 2.0, 2.0, 1)), Result("contiguous")]
    for floor, rate, passed in ((0.9, None, True), (1.1, None, False), (0.9, 4.0, True), (0.9, 4.1, False)):
        record = Record(replace(CASE, against=(), least=(("contiguous", floor),), rate=rate), results)
        record.least = {"contiguous": Spread(1.0, 1.0, 1.0, 1)}
        assert record.passed is passed
    record.least = {}
    assert record.passed is False, "who did not run kept no promise"


def test_other_peers_decline_caches_and_those_of_caches_other_cases() -> None:
    for name, peer in PEERS.items():
        if name in ("plain", "contiguous", "cache-sdpa"):
            assert peer.supports(CASE).ok
        elif name not in ("unshared", "as called", "cache-cudnn", "cudnn-paged", "varlen_attn"):
            assert not peer.supports(CASE).ok
        if peer.form(CASE) != CASE and name != "plain":
            assert not peer.supports(Case("other", heads=2, seqlen=8, head_dim=8)).ok
    assert PEERS["unshared"].supports(over(shared=64)).ok and not PEERS["unshared"].supports(CASE).ok
    assert not PEERS["cache-sdpa"].supports(over(mixed=True)).ok and not PEERS["cache-sdpa"].supports(over(seqlen=2)).ok


def attend_pages(q, k_pages, v_pages, table, lengths):
    """(B, Sq, Hq, D) over pages (pages, page, Hk, D), the last query at the last key."""
    outs = []
    for b, n in enumerate(lengths.flatten().tolist()):
        k, v = (x[table[b].long()].flatten(0, 1)[:n].transpose(0, 1) for x in (k_pages, v_pages))
        mask = torch.ones(q.shape[1], n, dtype=torch.bool).tril(n - q.shape[1])
        outs.append(F.scaled_dot_product_attention(q[b].transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1))
    return torch.stack(outs)


@pytest.mark.parametrize("rows", [1, 5])
def test_varlen_attn_is_called_as_it_wants(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = over(kv_seqlen=600, mixed=True, seqlen=rows, dtype="bfloat16")

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), seqused_k=None, block_table=None):
        assert k.shape[1] % 256 == 0 and window_size == ((-1, 0) if rows > 1 else (-1, -1)) and (max_q, max_k) == (rows, 600)
        assert cu_q.tolist() == [0, rows, 2 * rows, 3 * rows] and cu_k.dtype == torch.int32
        return attend_pages(q.view(3, rows, *q.shape[1:]), k, v, block_table, seqused_k).flatten(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    check_bound(PEERS["varlen_attn"], case)


def check_bound(peer: Contender, case: Case) -> None:
    form, given = peer.form(case), CacheTensors(case)
    call = peer.bind(form, given)
    last = caches.copies_of(form) - 1
    first, other = call(0), call(last)
    assert caches.judge(form, given, first).ok and last > 0
    assert not caches.judge(form, given, other).ok, "another cache, another result"


@pytest.mark.parametrize(("page", "rows"), [(16, 1), (64, 5)])
def test_cudnn_is_called_as_it_wants(page: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = over(page=page, kv_seqlen=320, seqlen=rows, dtype="bfloat16", mixed=True)
    module: Any = types.ModuleType("cudnn")

    class Out:
        def __getattr__(self, name):
            return lambda value: self

    class Pygraph:
        def __init__(self, **settings):
            self.dims: dict[int, tuple[list[int], list[int]]] = {}

        def tensor(self, uid, dim, stride, data_type):
            self.dims[uid] = (dim, stride)
            return uid

        def sdpa(self, **options):
            assert options["use_padding_mask"] and options["paged_attention_max_seq_len_kv"] == 320
            assert ("diagonal_band_right_bound" in options) is (rows > 1)
            self.options = options
            return Out(), None

        def build(self, modes):
            pass

        def get_workspace_size(self):
            return 8

        def execute(self, pack, workspace, handle):
            for uid, (dim, stride) in self.dims.items():
                assert list(pack[uid].shape) == dim and list(pack[uid].stride()) == stride, uid
            q, k, v = (pack[uid].transpose(1, 2) for uid in (1, 2, 3))
            assert k.shape[1] == page and pack[2].is_contiguous()
            pack[8].copy_(attend_pages(q, k, v, pack[4][:, 0, :, 0], pack[7]).transpose(1, 2))

    kinds = types.SimpleNamespace(BFLOAT16=1, FLOAT=2, INT32=3)
    members = {"pygraph": Pygraph, "data_type": kinds, "create_handle": lambda: 7, "set_stream": lambda handle, stream: None}
    members |= {"diagonal_alignment": types.SimpleNamespace(BOTTOM_RIGHT=1), "heur_mode": types.SimpleNamespace(A=1, FALLBACK=2)}
    for name, member in members.items():
        setattr(module, name, member)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(cache_peers, "_handle", lambda: 7)
    check_bound(PEERS["cudnn-paged"], case)


def test_peers_that_lack_something_say_what(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(over(dtype="bfloat16"), device="cuda")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v: None)
    assert "takes no block_table" in PEERS["varlen_attn"].supports(case).reasons[0]
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert any("cudnn is not installed" in reason for reason in PEERS["cudnn-paged"].supports(case).reasons)
    assert "reads pages" in PEERS["cudnn-paged"].supports(replace(case, cache=Cache(page=0))).reasons[-1]


def test_a_part_of_a_suite_has_the_means_of_whole_groups() -> None:
    from tilewise.cli.bench import contested

    cases = [case for case in suite("cache-gpu").cases if case.name.startswith(("decode/16", "graph"))]
    records = [Record(case, [Result("tilewise"), *map(Result, case.rivals)]) for case in cases]
    assert {record.case.group for record in contested(records, "cache-gpu", whole=False)} == {"decode/16"}
    assert not contested(records[1:], "cache-gpu", whole=False) and len(contested(records[1:], "cache-gpu", whole=True)) == 55


def test_tiles_of_caches_are_not_swept() -> None:
    from typer.testing import CliRunner

    from tilewise.cli.app import app

    result = CliRunner().invoke(app, ["bench", "--suite", "cache", "--case", "int8", "--sweep", "tiles"])
    assert result.exit_code and "whose tiles are not swept" in result.output + str(result.exception)
