"""Masks as the kernels take them: the ends of rows where a mask has such, else the classes of its tiles.

Both are worked out from what the mask's tensors hold, and kept: a call with the same contents takes them again, whoever makes it,
so the layers of a model share them. Contents are compared, and not versions: tensors are as long as the sequence, comparing them
is next to nothing, and a write that counts no version is seen too. Masks whose tensors are larger (dense ones) are classified in
each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.cpu.directions import broadcast_strides
from tilewise.backends.cpu.frames import class_rows
from tilewise.backends.cpu.spec import CLASSES, Kernel
from tilewise.masks import Lowered, MaskProgram, TileMap
from tilewise.masks.program import is_interval
from tilewise.masks.rectangles import Array
from tilewise.masks.rows import row_ends
from tilewise.problem import Problem

KEPT_BYTES = 4 << 20
"""Tensors of a mask up to so many bytes are kept, to be compared with those of the next call."""
KEPT_KEYS, KEPT_EACH = 32, 4
"""Masks that are kept: of so many structures and sizes, the last few of each."""
ROOM = 64
"""Ends behind the last row, for a strip that reaches past it."""
UNEVEN = 1.25
"""Blocks of rows of which one sees so many times the keys of another are started in an order of their own."""
Arguments = list[tuple[str, int]]
_kept: dict[Any, list[tuple[tuple[Tensor, ...], Any]]] = {}
_is_interval = cache(is_interval)


def lowered(problem: Problem, inputs: Inputs) -> Problem:
    """The problem with the ends of its rows for a mask, if every row sees one interval of keys; else as it is."""
    program = problem.program
    if _is_interval(program.structure):
        return problem
    known: Problem | None = problem.memory.get("cpu rows")
    if known is not None:
        return known
    packed = () if inputs.cu_q is None or inputs.cu_k is None else (inputs.cu_q, inputs.cu_k)
    tensors = (*map(_tensor, program.tensors), *packed)
    ends = keep(("rows", program.structure, program.ints, problem.shape), tensors, lambda: _ends(problem, packed))
    # the frozen fields but the mask: what layers keep of the problem is not that of the new one
    found = problem if ends is None else replace(problem, mask=Lowered(ends))
    if not tensors:
        problem.memory["cpu rows"], found.memory["cpu static"] = found, True
    return found


def _ends(problem: Problem, packed: tuple[Tensor, ...]) -> MaskProgram | None:
    program = problem.program
    arrays = MaskProgram(program.structure, program.ints, tuple(_tensor(t).numpy() for t in program.tensors))
    cu = (packed[0].numpy(), packed[1].numpy()) if packed else None
    ends = row_ends(arrays, problem.shape, cu)
    if ends is None:
        return None
    tensors = (torch.from_numpy(np.pad(side, ((0, 0), (0, ROOM))).astype(np.int32)) for side in ends)
    return MaskProgram("j", (_widen(*ends),), tuple(tensors))


def _widen(lo: Array, hi: Array) -> int:
    """1 if the last rows see many more keys than the first ones, as under a causal mask."""
    width, some = np.maximum(hi - lo, 0)[0], max(1, lo.shape[1] // 8)
    return int(width[-some:].sum() > 2 * width[:some].sum())


def is_static(problem: Problem) -> bool:
    """Are the mask's arguments the same in every call of the problem?"""
    return not problem.program.tensors or "cpu static" in problem.memory


def mask_arguments(problem: Problem, kernel: Kernel, keys: int, rows: int) -> tuple[Arguments, list[Tensor]]:
    """The arguments of a mask's tensors and of the classes of its tiles, with `keys` keys each; and the memory they point to.

    Threads that share blocks of `rows` rows (0: there is one thread) take them in the order that they should end together.
    """
    args: Arguments = []
    alive: list[Tensor] = []
    for n, given in enumerate(problem.program.tensors):
        tensor = _tensor(given)
        alive.append(tensor if tensor.dtype == torch.bool else tensor.to(torch.int32))
        args.append((f"mask_t{n}", alive[-1].data_ptr()))
        args += [(f"mask_t{n}_{axis}", stride) for axis, stride in enumerate(broadcast_strides(alive[-1]))]
    if rows and problem.program.structure == "j" and not kernel.backwards and not problem.varlen:
        order = keep(("order", problem.shape, rows), tuple(alive), lambda: _order(alive[0], alive[1], problem.seqlen_q, rows))
        if order is not None:
            return [*args, ("order", order.data_ptr())], [*alive, order]
    if _is_interval(problem.program.structure) or problem.varlen:
        return args, alive
    classes, memory = _class_arguments(problem, kernel, keys)
    return args + classes, [*alive, memory]


def _order(lo: Tensor, hi: Tensor, seqlen: int, rows: int) -> Tensor | None:
    """Blocks of rows, those that see most keys first; None where they are all alike."""
    width = (hi - lo).clamp(min=0)[:, :seqlen].sum(0)
    seen = torch.nn.functional.pad(width, (0, -seqlen % rows)).view(-1, rows).sum(1)
    if bool(seen.max() <= UNEVEN * seen.min()):
        return None
    return torch.argsort(seen, descending=True, stable=True).to(torch.int32)


def _class_arguments(problem: Problem, kernel: Kernel, keys: int) -> tuple[Arguments, Tensor]:
    program = problem.program
    tensors = tuple(map(_tensor, program.tensors))
    rows = class_rows(kernel.tile.rows)
    key = ("classes", program.structure, program.ints, problem.shape, rows, keys)
    classes: Tensor = keep(key, tensors, lambda: _classes(problem, rows, keys))
    steps = (*broadcast_strides(classes)[:2], classes.stride(2), rows)
    return list(zip(CLASSES, (classes.data_ptr(), *steps), strict=True)), classes


def _classes(problem: Problem, rows: int, keys: int) -> Tensor:
    """uint8 (B or 1, H or 1, rows of tiles, ⌈columns / 4⌉): two bits a tile."""
    tiles = TileMap(problem.program, problem.shape, rows, keys)
    sides = (problem.batch if tiles.per_batch else 1, problem.heads if tiles.per_head else 1)
    packed = np.zeros((*sides, tiles.rows, -(-tiles.cols // 4)), dtype=np.uint8)
    for b, h in np.ndindex(sides):
        classes = tiles.classes(b, h)
        for nth in range(4):
            some = classes[:, nth::4]
            packed[b, h, :, : some.shape[1]] |= some << (2 * nth)
    return torch.from_numpy(packed)


def keep(key: Any, tensors: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
    """What `make` gives, from an earlier call if that had a mask of the same key whose tensors held the same."""
    if sum(x.numel() * x.element_size() for x in tensors) > KEPT_BYTES:
        return make()
    entries = _kept.get(key)
    if entries is None:
        if len(_kept) >= KEPT_KEYS:
            _kept.clear()
        entries = _kept[key] = []
    for held, made in entries:
        if all(map(_equal, held, tensors)):
            return made
    made = make()
    entries.insert(0, (tuple(x.clone() for x in tensors), made))
    del entries[KEPT_EACH:]
    return made


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
