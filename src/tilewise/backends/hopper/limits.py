"""Why a kernel has no tile of some size: its warpgroups' rows, its registers, its shared memory."""

from __future__ import annotations

from tilewise.backends.hopper.backward.choose import no_sums, too_crowded
from tilewise.backends.hopper.backward.config import widths
from tilewise.backends.hopper.choose import crowded, shortage, unseen_by_all
from tilewise.backends.hopper.compiler import newer_registers
from tilewise.backends.hopper.config import SHARED_BYTES, padded, tiles_for
from tilewise.backends.hopper.intervals import mask_of
from tilewise.problem import Problem

SPARE_REGISTERS = 32
"""What a thread needs at least beside accumulators and weights."""


def why_not(problem: Problem, pass_: str, pair: tuple[int, int]) -> str:
    """Why the kernel of a pass has no tile of so many queries and keys."""
    if pass_ == "backward" and (reason := no_sums(problem)):
        return reason
    if pass_ not in ("forward", "backward", "backward_dkdv", "backward_dq"):
        return ""
    if pass_ == "backward" and pair == (128, 128) and (reason := too_crowded(problem)):
        return reason
    queries, keys, text = sides(problem, pass_)
    if pair[0] not in queries or pair[1] not in keys:
        return text
    if pass_ == "forward" and (reason := too_few_registers(problem, pair)):
        return reason
    held, limit = registers(problem, pass_, *pair)
    if held + SPARE_REGISTERS > limit:
        return f"a thread would hold {held} numbers in accumulators and weights, of {limit} registers"
    needed = least_bytes(problem, pass_, *pair)
    if needed > SHARED_BYTES:
        return f"it needs {needed / 1024:.0f} KiB of shared memory, of {SHARED_BYTES // 1024}"
    return "it was not built: its registers spill or it was slower"


def sides(problem: Problem, pass_: str) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Queries and keys a kernel may have in a tile, and why."""
    if pass_ == "forward":
        return (
            (128, 192),
            (64, 128),
            "its tiles are 64 queries for each of two or three warpgroups, against 64 or 128 keys",
        )
    if pass_ == "backward_dq":
        return (128,), (64, 128), "its tiles are 64 queries for each of two warpgroups, against 64 or 128 keys"
    if max(widths(problem.head_dim, problem.head_dim_v)) == 256:
        return (64,), (64,), "its two warpgroups share 64 keys, one for dV and one for dK, against 64 queries"
    if pass_ == "backward":
        return (64, 128), (128,), "its tiles are 64 keys for each of two warpgroups, against 64 or 128 queries"
    return (64, 128), (64, 128), "its tiles are 64 keys for each of two warpgroups or for both, against 64 or 128 queries"


def too_few_registers(problem: Problem, pair: tuple[int, int]) -> str:
    """Why one of the forward's tiles does not suit this mask."""
    mask = mask_of(problem)
    unseen = unseen_by_all(problem, mask)
    same = [tile for tile in tiles_for(problem.head_dim, problem.head_dim_v) if (tile.BLOCK_M, tile.BLOCK_N) == pair]
    return next((shortage(tile, mask, unseen, newer_registers(), crowded(problem)) for tile in same), "")


def registers(problem: Problem, pass_: str, m: int, n: int) -> tuple[int, int]:
    """Numbers a consumer's thread holds in accumulators and weights at the fullest, and its registers. 64 rows × 2 columns are
    one of each of a warpgroup's 128 threads."""
    if pass_ == "forward":
        dv = padded(problem.head_dim_v)
        return (dv + n + n // 2) // 2, 160 if m == 192 else 232
    d, dv = widths(problem.head_dim, problem.head_dim_v)
    return ((d + 2 * n) // 2, 240) if pass_ == "backward_dq" else ((d + dv + 2 * m) // 2, 240)


def least_bytes(problem: Problem, pass_: str, m: int, n: int) -> int:
    """Of the 16-bit tiles with two stages of what is streamed and one of what is held."""
    d, dv = widths(problem.head_dim, problem.head_dim_v)
    if pass_ == "forward":
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        return 2 * (m * (d + min(dv, 128)) + 2 * n * (d + dv))
    held, streamed = (m, n) if pass_ == "backward_dq" else (n, m)
    return 2 * (held + 2 * streamed) * (d + dv)
