"""One training step of MeanFlow: the average velocity u(z, r, t) is learned from its own derivative along the path.

The target is v - (t - r) du/dt, where du/dt is a Jacobian-vector product through the whole network, attention included:
`torch.func.jvp` gives the network's output and its derivative in one pass, and the loss trains the parameters as usual.

    python examples/mean_flow.py
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import tilewise as tw


class Network(nn.Module):
    """A transformer block over tokens, told about the times r and t."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = tw.nn.Attention(dim, heads)
        self.times, self.norm = nn.Linear(2, dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        x = self.norm(z + self.times(torch.stack([r, t], -1))[:, None])
        x = x + self.attention(x)
        return x + self.mlp(x)


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    noise, batch = torch.randn_like(data), len(data)
    t = torch.rand(batch)
    r = t * torch.rand(batch)
    v = noise - data  # the velocity of the straight path z = (1 - t) data + t noise
    z = data + t[:, None, None] * v
    parameters = dict(model.named_parameters())

    def average_velocity(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return functional_call(model, parameters, (z, r, t))

    u, du_dt = jvp(average_velocity, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du_dt
    return (u - target.detach()).pow(2).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model, data = Network(dim=32, heads=4), torch.randn(8, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        loss = loss_of(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
