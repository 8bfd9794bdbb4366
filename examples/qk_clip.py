"""QK-clip in a training loop: after each step, heads whose largest logit exceeded tau get smaller projections of q and k.

The logits of a head are products of q and k, so scaling both projections by sqrt(tau / max) brings the largest logit back to tau.
The forward reports it on the way: no second product, no N x N matrix.
"""

import torch
from torch import Tensor, nn

import tilewise as tw

BATCH, HEADS, SEQLEN, DIM, TAU = 2, 4, 64, 16, 20.0


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * HEADS * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, width, bias=False)
        self.max_logit = torch.zeros(HEADS)  # of the last step, by head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)  # (B, S, H, D)
        out, stats = tw.attention(q, k, v, mask=tw.causal(), layout="bshd", stats=("max_logit",))
        self.max_logit = stats.max_logit.amax(dim=(0, 2))  # (B, H, S) -> (H,)
        return self.out(out.flatten(-2))

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the rows of the q and k projections of every head that went beyond tau."""
        factor = (TAU / self.max_logit.clamp(min=TAU)).sqrt()
        by_head = self.qkv.weight.view(3, HEADS, DIM, -1)
        by_head[:2] *= factor[:, None, None]


def main() -> None:
    torch.manual_seed(0)
    model = Attention(32)
    with torch.no_grad():
        model.qkv.weight[: 2 * HEADS * DIM] *= 6  # a model whose logits have run away
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, SEQLEN, 32)
    for step in range(8):
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        before = model.max_logit.max().item()
        model.clip()
        print(f"step {step}: loss {loss.item():.3f}, largest logit {before:.1f}")
    model(x)
    assert model.max_logit.max() <= TAU * 1.01, "clipped weights give clipped logits"


if __name__ == "__main__":
    main()
