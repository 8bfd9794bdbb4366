"""A contender's call, and the process that runs one apart from the others and answers questions by JSON lines.

As a script this file runs any checkout of tilewise: `tilewise_call`, and what a checkout is asked (`run`, `time`), need nothing
but its public functions.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
WARM_SEQLEN = 32  # so short that the memory it leaves behind hides nothing


class Outcome(NamedTuple):
    """What one call computed, in the case's layout; gradients of q, k, v where the case has a backward."""

    out: Tensor
    grads: tuple[Tensor, ...] = ()


def tilewise_call(options: dict[str, Any]) -> Attention:
    """`tilewise.attention` or `attention_varlen` with the options of `Case.options`."""
    import tilewise as tw
    from tilewise import masks

    mask, keywords = masks.parse(options["mask"]), dict(options["keywords"])
    if options["data"] is not None:
        name, arguments = options["data"]
        mask = mask & getattr(masks, name)(*arguments)
    if options["slopes"] is not None:
        keywords["bias"] = tw.alibi(options["slopes"])
    keywords |= {"mask": mask, "backend": options["backend"]}
    if options["cu"] is not None:
        return cast(Attention, lambda q, k, v: tw.attention_varlen(q, k, v, options["cu"], **keywords))
    return cast(Attention, partial(tw.attention, layout=options["layout"], **keywords))


def bind_passes(
    attention: Attention, qkv: tuple[Tensor, ...], dout: Tensor, passes: str, learned: tuple[Tensor, ...] = ()
) -> Callable[[], Outcome]:
    """The call to be timed: forward alone, forward and backward (`training`), or `backward` alone.

    Gradients of `learned`, which the call holds already, are computed with the others and not given back."""
    if passes == "forward":
        return lambda: Outcome(attention(*qkv))
    leaves = tuple(t.detach().requires_grad_() for t in qkv)

    def train() -> Outcome:
        out = attention(*leaves)
        return Outcome(out.detach(), torch.autograd.grad(out, (*leaves, *learned), dout)[:3])

    if passes == "training":
        return train
    ready = attention(*leaves)
    return lambda: Outcome(
        ready.detach(), torch.autograd.grad(ready, (*leaves, *learned), dout, retain_graph=True)[:3]
    )


class Child:
    """Holds the tensors of one call and answers; a `spec` that differs from the last one begins anew.

    A spec is a `case` and a `contender` of this checkout, or the file of a `call` of another one's.
    """

    def __init__(self) -> None:
        self.clock_for = runpy.run_path(str(Path(__file__).parents[2] / "hardware" / "timers.py"))["clock_for"]
        self.threads = torch.get_num_threads()
        self.spec: dict[str, Any] = {}
        self.case: Any = None
        self.tensors: Any = None
        self.call: Callable[[], Outcome] | None = None
        self.before: int | None = None

    def answer(self, ask: str, spec: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        if spec != self.spec:
            self.spec, self.call, self.before, self.case, self.tensors = spec, None, None, None, None
            torch.set_num_threads(spec["threads"] or self.threads)
            if "call" not in spec:
                from tilewise.lab.bench.cases import Case

                self.case = Case(**spec["case"])
                self.tensors = self.case.tensors()
        return cast(dict[str, Any], getattr(self, ask)(**arguments))

    def bound(self) -> Callable[[], Outcome]:
        """The whole call, bound once."""
        if self.call is None:
            self.call = self.bind(self.case.seqlen) if self.case else self.load()
        return self.call

    def load(self) -> Callable[[], Outcome]:
        given = torch.load(self.spec["call"], map_location=self.spec["device"], weights_only=True)
        *qkv, dout = given["tensors"]
        return bind_passes(tilewise_call(given["options"]), tuple(qkv), dout, self.spec["passes"])

    def bind(self, seqlen: int) -> Callable[[], Outcome]:
        """The call over the first `seqlen` tokens, on views of the same tensors."""
        from tilewise.lab.bench.engine import bind_run
        from tilewise.lab.bench.peers import contender

        case, tensors = self.case, self.tensors
        if seqlen != case.seqlen:
            views = (x.narrow(2 if case.layout == "bhsd" else 1, 0, seqlen) for x in tensors[:4])
            case, tensors = replace(case, seqlen=seqlen), type(tensors)(*views, *tensors[4:])
        return bind_run(case, contender(self.spec["contender"]), tensors)

    def run(self, file: str | None = None) -> dict[str, Any]:
        """Once, which compiles what is to be compiled; `file` gets the outcome."""
        outcome = self.bound()()
        if file:
            torch.save([outcome.out.contiguous(), *(grad.contiguous() for grad in outcome.grads)], file)
        elif self.spec["device"].startswith("cuda"):
            torch.cuda.synchronize()
        return {}

    def time(self, number: int = 1) -> dict[str, Any]:
        return {"seconds": self.clock_for(self.spec["device"])(self.bound(), number)}

    def memory(self, seqlen: int) -> dict[str, Any]:
        """The most bytes needed so far beyond q, k and v: output, workspace and any mask the contender must be given.

        Asked for growing lengths. The base is the use before the first run, for memory that a run has freed may still
        be resident when the next one begins and would hide its need.
        """
        from tilewise.lab.bench.memory import begin_peak, peak_bytes

        device = self.spec["device"]
        if self.before is None:
            # A short run of the same kind loads libraries, threads and compiled kernels before memory is looked at.
            self.bind(min(self.case.seqlen, WARM_SEQLEN))()
            self.before = begin_peak(device)
        self.call = run = self.bind(seqlen)
        self.outcome = run()
        return {"peak_bytes": max(0, peak_bytes(device) - self.before)}

    def judge(self) -> dict[str, Any]:
        from tilewise.lab.bench.judge import Expected

        return Expected(self.case, self.tensors).judge(self.outcome)._asdict()


def serve() -> None:
    """Answers go where standard output was; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child()
    for line in sys.stdin:
        try:
            answer = child.answer(**json.loads(line))
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
