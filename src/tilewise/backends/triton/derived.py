"""What the Triton kernels run for derivatives and statistics. Imports neither torch nor triton."""

from __future__ import annotations

from tilewise.backends.gpu.operands import padded
from tilewise.backends.triton import onchip
from tilewise.backends.verdict import Verdict
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.gpu import power_of_two
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

KERNELS = {
    "jvp": "jvp_kernel",
    "double_backward_dkdv": "keys_kernel",
    "double_backward_dq": "queries_kernel",
    "double_backward_dbias": "second_bias_kernel",
    "key_mass": "mass_kernel",
    "top": "top_kernel",
    "entropy_dq": "entropy_queries_kernel",
    "entropy_dk": "entropy_keys_kernel",
    "entropy_dbias": "entropy_bias_kernel",
}
DERIVED_UP_TO = 256
"""Head dims of the kernels."""


def derives(problem: Problem, spec: DeviceSpec, *, derivative: str) -> Verdict:
    """Both serve every term."""
    most = max(problem.head_dim, problem.head_dim_v)
    return Verdict.of(
        f"{derivative}: head dims up to {DERIVED_UP_TO}, found {most}" if most > DERIVED_UP_TO else None,
        f"{derivative}: positions of a part of a whole are not known to its kernels" if problem.origins else None,
    )


def derivative_tiles(problem: Problem, spec: DeviceSpec, derivative: str) -> dict[str, TilePlan]:
    """Fixed tiles: a JVP holds two accumulators and four streamed operands, a double backward three operands and streams four."""
    names = ["jvp"] if derivative == "jvp" else ["double_backward_dkdv", "double_backward_dq"]
    names += ["double_backward_dbias"] * (derivative != "jvp" and problem.bias is not None)
    width = max(padded(problem.head_dim), padded(problem.head_dim_v)) * problem.itemsize // 2
    plans = {}
    for name in names:
        m, n, stages, warps = _derivative_tile(problem, spec, name, width)
        reason = f"tiles of {m} × {n} leave room for operands of {width * 2} bytes a token and their tangents"
        outer = "keys" if name.endswith("dkdv") else "queries"
        plans[name] = TilePlan(m, n, stages, warps, pass_=name, kernel=KERNELS[name], outer=outer, reasons=(reason,))
    return plans


def _derivative_tile(problem: Problem, spec: DeviceSpec, name: str, width: int) -> tuple[int, int, int, int]:
    """Queries, keys, buffers and warps of a tile; `width`: the 16-bit numbers of an operand's row."""
    if not spec.is_gpu:
        return 16, 32, 1, 4
    plain = not (problem.bias or problem.alibi or problem.softcap or problem.dropout_p or problem.itemsize != 2)
    if onchip.widest(spec) == "wgmma" and plain and width <= 128:  # two warpgroups, by the largest products that fit
        streamed = 64 if width <= 64 or name == "jvp" else 32
        return (streamed, 128, 2, 8) if name == "double_backward_dkdv" else (128, streamed, 2, 8)
    m, n = (64, 32) if width <= 64 else (32, 32) if width <= 128 else (16, 32) if width <= 256 else (16, 16)
    if problem.bias is not None and width <= 128:  # its tile and its tangent's take registers: none spill so in a loop
        return (16, 32, 1, 4) if name == "double_backward_dbias" and width > 64 else (32, 32, 1, 8)
    return m, n, 1, 4 if plain or width > 64 else 8


def no_statistics(problem: Problem) -> str | None:
    """Why a call with statistics is not served."""
    if not problem.stats:
        return None
    if problem.origins:
        return "stats: positions of a part of a whole are not known to its kernels"
    most = max(problem.head_dim, problem.head_dim_v)
    if most > DERIVED_UP_TO:
        return f"stats: head dims up to {DERIVED_UP_TO}, found {most}"
    return None


def sweep_tile(problem: Problem, spec: DeviceSpec, name: str) -> TilePlan:
    """Of a kernel that has one product QKᵀ, and perhaps another for a gradient. To rank scores takes at least k of them."""
    width = padded(problem.head_dim) * problem.itemsize // 2
    m, n = (64, 64) if width <= 64 else (64, 32) if width <= 128 else (32, 32) if width <= 256 else (16, 16)
    if name == "top":
        m, n = 16 if width > 128 or not spec.is_gpu else 32, 64 if spec.is_gpu else max(16, power_of_two(problem.top))
    elif not spec.is_gpu:
        m, n = 32, 32
    elif name != "entropy_dq":
        m, n = n, m
    outer = "keys" if name in ("key_mass", "entropy_dk") else "queries"
    return TilePlan(m, n, 1, 4, pass_="sweep", kernel=KERNELS[name], outer=outer, reasons=("a tile by rule",))
