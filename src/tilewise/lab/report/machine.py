"""What the page says of this machine: its figures, its measured ceilings, a run with its certificate, and records on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilewise import hardware
from tilewise.api.attention import attention
from tilewise.diagnostics.certify import certify
from tilewise.diagnostics.explain import explain
from tilewise.hardware import Ceilings, DeviceSpec
from tilewise.masks import causal

RUN = {"heads": 4, "seqlen": 2048, "head_dim": 64}
FIGURES = (
    "units", "clock_hz", "sram_bytes", "register_bytes", "l2_bytes", "l3_bytes", "dram_bytes", "dram_bandwidth",
    "l2_bandwidth", "exp_rate",
)  # fmt: skip


def describe(spec: DeviceSpec, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """A machine's figures with the source of each, and what was measured on it, of which its roof is then made.

    A figure that is no better than an estimate (a clock that the system does not tell) can lie below what was measured. A
    theoretical roof cannot: what was reached is possible, so the estimate gives way.
    """
    held, dtype = spec.figures(), "bfloat16" if spec.is_gpu else "float32"
    roof = spec if ceilings is None else ceilings.apply(spec)
    figures = [
        {"name": name, "value": held[name], "source": spec.sources.get(name, "")} for name in FIGURES if name in held
    ]
    return {
        "key": spec.key,
        "name": spec.name,
        "arch": spec.arch,
        "gpu": spec.is_gpu,
        "figures": figures,
        "peak": {dtype: flops for dtype, flops in spec.peak.items() if flops},
        "peakSource": spec.sources.get("peak", ""),
        "dramBandwidth": roof.dram_bandwidth,
        "flops": roof.flops(dtype),
        "theory": {
            "flops": max(spec.flops(dtype), roof.flops(dtype)),
            "bandwidth": max(spec.dram_bandwidth, roof.dram_bandwidth),
        },
        "measured": None if ceilings is None else asdict(ceilings),
    }


def machines(catalogued: Iterable[str]) -> tuple[dict[str, DeviceSpec], dict[str, Any]]:
    """The specs by key, with their descriptions: GPUs of the catalogue, then the live machine with its ceilings as measured."""
    live = hardware.device(None)
    ceilings = hardware.measure("cuda" if live.is_gpu else "cpu")
    others = {key: hardware.device(key) for key in catalogued}
    described = {**{key: describe(spec) for key, spec in others.items()}, "here": describe(live, ceilings)}
    return {**others, "here": ceilings.apply(live)}, described


def run_here() -> dict[str, Any]:
    """One call on this machine, certified, explained and measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shape = (1, RUN["heads"], RUN["seqlen"], RUN["head_dim"])
    q, k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    out, lse = attention(q, k, v, mask=causal(), return_lse=True)
    certificate = certify(q, k, v, out, lse=lse, mask=causal(), rows=512)
    explanation = explain(q, k, v, mask=causal(), measure=True)
    return {
        "call": "tw.attention(q, k, v, mask=tw.causal())",
        "certificate": {**certificate.to_dict(), "lines": certificate.lines()},
        "explanation": explanation.to_dict(),
    }


def records(directories: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Bench and traffic records in these directories, the newest first; files that are none are passed over."""
    kept: dict[str, list[dict[str, Any]]] = {"bench": [], "traffic": []}
    paths = sorted(path for directory in directories if directory.is_dir() for path in directory.rglob("*.json"))
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(document, dict):
            continue
        if document.get("suite") == "traffic" and "kernels" in document:
            kept["traffic"].append({**document, "file": path.name})
        elif isinstance(document.get("records"), list) and document["records"] and "machine" in document:
            kept["bench"].append(_bench(document, path.name))
    return {kind: sorted(some, key=lambda one: str(one["date"]), reverse=True) for kind, some in kept.items()}


def _bench(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A record file cut down to what is drawn: cases with the spread of each contender."""
    cases = []
    for record in document["records"]:
        times = {r["contender"]: r["seconds"] for r in record.get("results", ()) if r.get("seconds")}
        if times:
            cases.append({"words": record.get("words", ""), "times": times, "ratio": record.get("ratio")})
    return {
        "file": name,
        "suite": document.get("suite", ""),
        "date": document.get("date", ""),
        "where": _where(document),
        "cases": cases,
    }


def _where(document: dict[str, Any]) -> str:
    """What the cases ran on: a machine with a GPU has suites for its CPU too. Cases that do not say ran on its best."""
    machine = document["machine"]
    cases = [record.get("case") for record in document["records"]]
    kinds = [case.get("device", "cuda") if isinstance(case, dict) else "cuda" for case in cases]
    gpus = [str(gpu.get("name", "")) for gpu in machine.get("gpus") or ()]
    names = [gpus[0] if gpus and str(kind).startswith("cuda") else str(machine.get("cpu", "")) for kind in kinds]
    return ", ".join(dict.fromkeys(names))
