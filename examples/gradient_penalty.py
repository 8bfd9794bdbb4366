"""A gradient penalty (R1, WGAN-GP) on a discriminator with attention: the loss holds a gradient, which training differentiates.

`create_graph=True` keeps the graph of the gradient; its backward is attention's double backward, in memory linear in the tokens.

    python examples/gradient_penalty.py
"""

import torch
from torch import Tensor, nn

import tilewise as tw


class Discriminator(nn.Module):
    """Scores a sequence of tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(dim), tw.nn.Attention(dim, heads), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(self.norm(x))).mean(dim=(1, 2))


def penalty(model: nn.Module, real: Tensor) -> Tensor:
    """R1: the mean squared norm of the score's gradient at real data."""
    real = real.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
    return gradient.pow(2).sum(dim=(1, 2)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model, real, fake = Discriminator(dim=32, heads=4), torch.randn(8, 24, 32), torch.randn(8, 24, 32) * 2
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(5):
        scores = nn.functional.softplus(-model(real)).mean() + nn.functional.softplus(model(fake)).mean()
        r1 = penalty(model, real)
        optimizer.zero_grad()
        (scores + 5.0 * r1).backward()
        optimizer.step()
        print(f"step {step}: loss {scores.item():.4f}, penalty {r1.item():.5f}")
