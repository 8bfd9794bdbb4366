"""Which packed sequence owns a tile, in Triton's interpreter; a program of its own, as `interpreted.py` is.

TRITON_INTERPRET=1 python -m tests.backends.packed_tiles
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from tilewise.backends.gpu.tile import find_sequence

BLOCK = 16


@triton.jit
def owners_kernel(cu, batch, owner_ptr, number_ptr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    owner, number = find_sequence(cu, batch, tile, BLOCK)
    tl.store(owner_ptr + tile, owner)
    tl.store(number_ptr + tile, number)


def check(lengths: torch.Tensor) -> None:
    """Every tile of every sequence is somebody's: its own sequence's, in order."""
    batch = len(lengths)
    cu = torch.zeros(batch + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    tiles = int(cu[-1]) // BLOCK + batch
    owner, number = torch.empty(2, tiles, dtype=torch.int32)
    owners_kernel[(tiles,)](cu, batch, owner, number, BLOCK)
    found = set(zip(owner.tolist(), number.tolist(), strict=True))
    wanted = {(b, i) for b, n in enumerate(lengths.tolist()) for i in range(-(-n // BLOCK))}
    assert wanted <= found and len(found) == tiles, (batch, wanted - found)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 128, 129, 300):
        check(torch.randint(0, 40, (batch,), generator=generator))
    check(torch.tensor([0, 0, 33, 0, 16, 1, 0]))
    print("ok")
