"""Random masks and problems, what Python says of them, and the playground beside it, in whatever engine runs its scripts."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import model
from tilewise.errors import MaskError
from tilewise.masks import Binding, MaskShape, TileMap, parse
from tilewise.model import TilePlan
from tilewise.problem import Problem

SCRIPTS = Path(__file__).parents[2] / "docs" / "playground"
SOURCES = [(SCRIPTS / f"{name}.js").read_text(encoding="utf-8") for name in ("words", "parse", "masks", "traffic")]
CALL = """function answer(text, problem) {
  let python = null;
  try {
    python = MaskText.python(MaskText.parse(text));
    const { tiles, ...rest } = TileModel.evaluate(text, problem);
    return JSON.stringify({ ...rest, tiles: tiles.map((one) => ({ ...one, classes: [...one.classes] })) });
  } catch (error) {
    if (!(error instanceof MaskText.MaskError)) throw error;
    const said = ["en", "zh"].map((language) => TileWords.error(error, language));
    return JSON.stringify({ error: error.key, at: error.at, said, python });
  }
}"""
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
OWN = ("documents", "blocks", "selected")
"""Masks that the playground reads from text and `masks.parse` does not."""
ROUNDS = 500


def asker(run: Callable[[str], str]) -> Ask:
    """The playground's answer, of an engine that evaluates JavaScript."""
    return lambda text, problem: dict(json.loads(run(f"answer({json.dumps(text)}, {json.dumps(problem)})")))


class Case:
    """A random expression over a random problem."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.batch, self.queries = r.choice((1, 1, 2, 3)), r.randint(1, 400)
        self.keys = self.queries if r.random() < 0.5 else r.randint(1, 400)
        kv_heads = r.choice((1, 2, 4))
        self.problem: dict[str, Any] = {
            "batch": self.batch, "heads": kv_heads * r.choice((1, 2, 3)), "kvHeads": kv_heads, "queries": self.queries,
            "keys": self.keys, "headDim": r.choice((16, 64, 80, 128)),
            "dtype": r.choice(("float16", "bfloat16", "float32", "float64")),
            "blockQ": r.choice((1, 16, 32, 48, 64, 128)) if self.queries < 65 else r.randint(12, 140),
            "blockK": r.choice((1, 16, 32, 48, 64, 128)) if self.keys < 65 else r.randint(12, 140),
        }  # fmt: skip
        self.text = self.expression(r.choice((0, 1, 1, 2, 2, 3)))

    @property
    def binding(self) -> Binding:
        return Binding(MaskShape(self.batch, self.problem["heads"], self.queries, self.keys))

    def expression(self, depth: int) -> str:
        r = self.random
        if not depth:
            return self.leaf()
        kind = r.choice(("~", "&", "&", "|", "()"))
        if kind == "~":
            return f"~{r.choice(('', ' '))}({self.expression(depth - 1)})" if r.random() < 0.5 else f"~{self.leaf()}"
        if kind == "()":
            return f"({self.expression(depth - 1)})"
        return f"{self.expression(depth - 1)} {kind} {self.expression(depth - 1)}"

    def leaf(self) -> str:
        name = self.random.choice(
            ("full", "causal", "causal", "window", "window", "window", "prefix", "key_padding", *OWN)
        )
        return getattr(self, f"_{name}")()  # type: ignore[no-any-return]

    def _width(self) -> int:
        r = self.random
        return r.choice((r.randint(1, 20), r.randint(1, 400), 2**30 if r.random() < 0.2 else 7))

    def _each(self, low: int, high: int) -> str:
        return str([self.random.randint(low, high) for _ in range(self.random.choice((1, self.batch)))])

    def _place(self) -> list[str]:
        r = self.random
        far = r.choice((2**30, -(2**30) + 1, 2**29)) if r.random() < 0.1 else r.randint(-150, 300)
        options = ["align=top_left", "top_left", "bottom_right", f"offset={far}", f"offset={self._each(-150, 300)}"]
        return r.sample(options[:3], 1) if r.random() < 0.25 else [r.choice(options[3:])] if r.random() < 0.4 else []

    def _full(self) -> str:
        return self.random.choice(("full", "full()"))

    def _causal(self) -> str:
        place = self._place()
        return f"causal({', '.join(place)})" if place else self.random.choice(("causal", "causal()"))

    def _window(self) -> str:
        r = self.random
        left, right = self._width(), self._width()
        args = [str(left)] if r.random() < 0.6 else [str(left - 1), r.choice(("", "right=")) + str(right - 1)]
        return f"window({', '.join([*args, *self._place()])})"

    def _prefix(self) -> str:
        n = self.random.choice((str(self.random.randint(0, 450)), self._each(-5, 450)))
        return f"prefix({n})"

    def _key_padding(self) -> str:
        start = f", start={self._each(0, 60)}" if self.random.random() < 0.4 else ""
        return f"key_padding({self._each(-3, 420)}{start})"

    def _parts(self, length: int) -> list[int]:
        cuts = sorted(self.random.sample(range(1, length), min(length - 1, self.random.randint(0, 5))))
        return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]

    def _documents(self) -> str:
        queries = "" if self.queries == self.keys and self.random.random() < 0.7 else f", q_lengths={self._parts(self.queries)}"
        return f"documents({self._parts(self.keys)}{queries})"

    def _blocks(self) -> str:
        r = self.random
        sizes = [r.choice((16, 32, 50, 64, 100, 128)) for _ in range(2)]
        rows, cols = -(-self.queries // sizes[0]), -(-self.keys // sizes[1])
        share = r.choice((0.3, 0.7, 0.95))
        table = [[int(r.random() < share) for _ in range(cols)] for _ in range(rows)]
        return f"blocks({table}, ({sizes[0]}, {sizes[1]}))"

    def _selected(self) -> str:
        r = self.random
        block, per, count = r.choice((16, 50, 64, 128)), r.choice((16, 48, 64, 128)), r.randint(1, 5)
        blocks = -(-self.keys // block)
        lists = [[r.randint(-1, blocks) for _ in range(count)] for _ in range(-(-self.queries // per))]
        return f"selected({lists}, block={block}, per={per})"


def mask_of(python: str) -> tw.Mask:
    """The mask of the call that the playground shows beside an expression."""
    return eval(python, {"tw": tw, "np": np, "__builtins__": {"bool": bool}})  # type: ignore[no-any-return]


def expected(problem: dict[str, Any], mask: tw.Mask) -> dict[str, Any]:
    """Classes, counts, pairs, area, FLOPs and traffic, as the package says."""
    p = Problem.of(
        batch=problem["batch"], heads=problem["heads"], kv_heads=problem["kvHeads"], seqlen=problem["queries"],
        kv_seqlen=problem["keys"], head_dim=problem["headDim"], dtype=problem["dtype"], mask=mask,
    )  # fmt: skip
    tile = TilePlan(problem["blockQ"], problem["blockK"])
    tiles = TileMap(p.program, p.shape, *tile.sizes)
    work = model.work(p, tile)
    ways = {name: getattr(model, name)(p, tile) for name in ("standard", "v1", "v2", "compulsory")}
    return {
        "tiles": [tiles.classes(b) for b in range(p.batch if tiles.per_batch else 1)],
        "counts": list(tiles.counts()),
        "pairs": work.pairs,
        "flops": {"useful": work.useful, "visited": work.visited, "executed": work.executed},
        "traffic": {name: {"reads": dict(t.reads), "writes": dict(t.writes)} for name, t in ways.items()},
    }


def same_program(left: tw.Mask, right: tw.Mask, case: Case) -> bool:
    """Do two masks lower to the same for a problem?"""
    a, b = (one.lower(case.binding) for one in (left, right))
    tensors = len(a.tensors) == len(b.tensors) and all(map(np.array_equal, a.tensors, b.tensors))
    return (a.structure, a.ints) == (b.structure, b.ints) and tensors


def compare(ask: Ask, seeds: range) -> Counter[str]:
    """Random cases, until the first difference; how many tiles of each class were compared, and how many masks of each kind."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        case = Case(seed)
        said = ask(case.text, case.problem)
        where = f"case {seed}: {case.text} with {case.problem}"
        if "error" in said:
            assert said["error"] == "terms" and _too_many(mask_of(said["python"]), case), (where, said)
            continue
        mask = mask_of(said["python"])
        if not any(name in case.text for name in OWN):
            assert same_program(parse(case.text), mask, case), where
        want = expected(case.problem, mask)
        assert len(said["tiles"]) == len(want["tiles"]), where
        for own, classes in zip(said["tiles"], want["tiles"], strict=True):
            assert (own["rows"], own["cols"]) == classes.shape, where
            assert own["classes"] == classes.ravel().tolist(), where
            seen += Counter({f"class {kind}": n for kind, n in enumerate(np.bincount(classes.ravel(), minlength=3).tolist())})
        for key in ("counts", "pairs", "flops", "traffic"):
            assert said[key] == want[key], (where, key, said[key], want[key])
        seen += Counter(name for name in ("full", "causal", "window", "prefix", "key_padding", *OWN) if name in case.text)
    return seen


def _too_many(mask: tw.Mask, case: Case) -> bool:
    try:
        mask.lower(case.binding)
    except MaskError as error:
        return "alternatives" in str(error)
    return False


def check(seen: Counter[str]) -> None:
    """What was compared is enough: 10,000 tiles, of every class, under every kind of mask."""
    tiles = [seen[f"class {kind}"] for kind in range(3)]
    assert sum(tiles) >= 10_000 and min(tiles) >= 1_000, seen
    assert all(seen[name] >= 10 for name in ("full", "causal", "window", "prefix", "key_padding", *OWN)), seen
