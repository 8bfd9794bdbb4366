"""Forms of the Hopper forward that a problem asks for, as Python threads; Philox in assembly, instruction by instruction."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.gluon_values import Value
from tests.backends.test_hopper_backward_logic import Shape, build
from tests.backends.test_hopper_forward_logic import run
from tests.numerics import checks
from tilewise.backends.hopper import draw, quads
from tilewise.backends.hopper.backward.arguments import make_plan
from tilewise.backends.hopper.plan import offers
from tilewise.hardware import lookup
from tilewise.numerics.philox import MULTIPLIERS, WEYL, WORD, philox

CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
CASES = [
    ("LEFT_SKIP", Shape(64, WINDOW, 500, h=2, hk=1, sinks=True)),
    ("LEFT_SKIP", Shape(64, "tw.causal() & tw.window(1)", 450)),
    ("LEFT_SKIP", Shape(64, "tw.window(70, 20)", 300)),
    ("WORDS", Shape(64, "tw.causal() & tw.window(40)", 400, sinks=True)),
    ("WORDS", Shape(128, CAUSAL, 300)),
    ("WORDS", Shape(128, CAUSAL, 300, h=2, hk=1, b=2, dropout=0.3)),
    ("ALIBI_FIRST", Shape(128, CAUSAL, 300, h=2, alibi=2, b=2)),
    ("ALIBI_FIRST", Shape(64, WINDOW, 300, alibi=1, sinks=True)),
    ("BIAS_STAGES", Shape(64, "None", 200, h=2, hk=1, b=2, bias="bhqk")),
    ("BIAS_STAGES", Shape(128, CAUSAL, 136, 1208, h=2, hk=1, b=2, bias="hqk")),
    ("BIAS_STAGES", Shape(64, CAUSAL, 1200, bias="qk")),
    ("QUADS", Shape(80, "None", 132, 204, h=2, dropout=0.1, sinks=True)),
    ("QUADS", Shape(128, CAUSAL, 300, h=2, hk=1, b=2, dropout=0.3)),
    ("QUADS", Shape(96, WINDOW, 500, dropout=0.1)),
    ("QUADS", Shape(128, WINDOW, 300, dropout=0.6, softcap=3.0)),
    ("DRAWERS", Shape(64, CAUSAL, 300, h=2, hk=1, b=2, dropout=0.3)),
    ("DRAWERS", Shape(64, "None", 300, 1111, h=2, dropout=0.5)),
    ("DRAWERS", Shape(64, WINDOW, 500, dropout=0.1)),
    ("DRAWERS", Shape(48, "None", 132, 203, h=2, dropout=0.1, sinks=True)),
    ("DRAWERS", Shape(64, CAUSAL, 1200, dropout=0.3)),
    ("DRAWERS", Shape(64, CAUSAL, 1200, 1900, h=4, hk=2, b=2, dropout=0.05)),
    ("DRAWERS", Shape(64, "tw.window(200, 100)", 700, dropout=0.9)),
    ("DRAWERS", Shape(64, WINDOW, 300, dropout=0.6, softcap=3.0)),
    ("DRAWERS", Shape(32, CAUSAL, 300, dropout=0.6)),
]


@pytest.fixture(autouse=True)
def tensors_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


@pytest.mark.parametrize(("flag", "shape"), CASES, ids=lambda x: str(x)[:60])
def test_results(flag: str, shape: Shape) -> None:
    problem, inputs = build(shape)
    config = offers(problem, "forward")[0].config
    assert getattr(config, flag), "the form is not taken"
    out, lse = run(problem, inputs, None)
    assert checks.check_forward(problem, inputs, out, lse) == []


def test_heads_that_share_keys_are_shared_out_evenly() -> None:
    """64 query heads of 8 key heads, one of which alone is more than the L2 cache holds: the longest program and the mean."""
    problem = tw.Problem.of(heads=64, kv_heads=8, seqlen=8192, head_dim=64, mask=tw.causal(), device="cuda")
    steps = make_plan(problem, lookup("h200"), lambda *_: None).steps
    order = next(step.arguments.order for step in steps if step.name == "keys_kernel")  # type: ignore[union-attr]
    assert sorted(order[order >= 0]) == list(range(512))
    times = np.where(order >= 0, 64 - order % 64, 0).sum(0)
    assert times.max() < 1.02 * times.mean()


def executed(text: str, given: list[int]) -> list[int]:
    """The outputs of a piece of assembly without branches, of whole numbers."""
    named: dict[str, int] = {f"${i}": x for i, x in enumerate(given)}
    results: dict[int, int] = {}

    def value(x: str) -> int:
        return int(x, 0) if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+", x) else named[x]

    for line in text.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        x = [part.strip() for part in re.split(r",\s*(?![^{]*})", rest)]
        if not op or op == ".reg":
            continue
        if op == "mov.b64" and x[0].startswith("{"):
            low, high = (part.strip() for part in x[0].strip("{}").split(","))
            named[low], named[high] = value(x[1]) & 0xFFFFFFFF, value(x[1]) >> 32
        elif op == "mov.b64":
            low, high = (part.strip() for part in x[1].strip("{}").split(","))
            named[x[0]] = value(low) | value(high) << 32
        elif op == "mov.b32":
            named[x[0]] = value(x[1])
        elif op == "mul.wide.u32":
            named[x[0]] = value(x[1]) * value(x[2])
        elif op == "lop3.b32":
            assert x[4] == "0x96"
            named[x[0]] = value(x[1]) ^ value(x[2]) ^ value(x[3])
        elif op == "add.u32":
            named[x[0]] = (value(x[1]) + value(x[2])) & 0xFFFFFFFF
        elif op == "xor.b32":
            named[x[0]] = value(x[1]) ^ value(x[2])
        elif op == "shr.u32":
            results[int(x[0][1:])] = named[x[0]] = value(x[1]) >> value(x[2])
        elif op == "@kept":
            target, *rest_ = (part.strip() for part in rest.removeprefix("or.b32 ").split(","))
            if named["kept"]:
                results[int(target[1:])] = named[target] = value(rest_[0]) | value(rest_[1])
        elif op == "setp.ge.u32":
            named[x[0]] = int(value(x[1]) >= value(x[2]))
        elif op == "selp.f32":
            results[int(x[0][1:])] = value(x[1]) if named[x[3]] else 0
        else:
            raise AssertionError(line)
    return [results[i] for i in sorted(results)]


def test_the_calls_of_philox() -> None:
    """Each of two calls drops its own four numbers by its own four words."""
    text = quads._drop(2)
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        words = torch.randint(0, 2**32, (6, 2), generator=g)
        words[4:, 1] = words[4:, 0]  # one key
        below = int(torch.randint(0, 2**32, (), generator=g))
        numbers = list(range(1, 9))
        given = [0] * 8 + numbers + words.flatten().tolist() + [below, below]
        found = executed(text, given)
        seed = words[4, 0] | words[5, 0] << 32
        want = torch.stack(philox(tuple(words[:4]), seed)) >= below  # type: ignore[arg-type]  # [word, call]
        assert found == torch.where(want, torch.tensor(numbers).reshape(4, 2), 0).flatten().tolist()


@pytest.mark.parametrize(("rows", "at_once"), [(4, 2), (2, 4), (1, 8), (4, 1)])
def test_words_that_are_drawn(rows: int, at_once: int) -> None:
    """The bits of whole words, from the third round of Philox on, with what rows and fours of keys share."""
    text = draw.drawing(rows, at_once)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        q = torch.randint(0, 2**31, (rows,), generator=g).tolist()
        four, head, batch, low, high, below = torch.randint(0, 2**31, (6,), generator=g).tolist()
        low, below = low << 1 | 1, below << 1
        of_head = head * MULTIPLIERS[1]
        shared = [(x ^ of_head >> 32 ^ low) * MULTIPLIERS[0] for x in q]
        second = of_head & WORD ^ low + WEYL[0] & WORD
        key = [batch ^ high, second, high + WEYL[1], low + 2 * WEYL[0], high + 2 * WEYL[1]]
        for turn in range(3, 10):
            key += [low + turn * WEYL[0], high + turn * WEYL[1]]
        words = [0] * rows
        for e in range(0, 8, at_once):
            given = [words, [x >> 32 for x in shared], [x & WORD for x in shared], [four + e] * rows, [below] * rows]
            given += [[x & WORD] * rows for x in key]
            words = executed(text, [0] * rows + [x for one in given for x in one])
        counter = (four + torch.arange(8), torch.tensor(q)[:, None], torch.tensor(head), torch.tensor(batch))
        kept = torch.stack(torch.broadcast_tensors(*philox(counter, torch.tensor(low | high << 32))), -1) >= below
        assert words == (kept.flatten(1).long() << torch.arange(32)).sum(1).tolist()


def test_the_keys_of_rounds() -> None:
    assert [draw.round_key(i, n) & WORD for n in range(10) for i in range(2)] == [
        n * WEYL[i] & WORD for n in range(10) for i in range(2)
    ]
