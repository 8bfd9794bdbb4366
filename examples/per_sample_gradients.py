"""Per-sample gradients, as DP-SGD clips them: `vmap(grad(loss))` over the batch, in one call of attention for all samples.

    python examples/per_sample_gradients.py
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tilewise as tw

CLIP, NOISE = 1.0, 0.1


class Classifier(nn.Module):
    def __init__(self, dim: int, heads: int, classes: int) -> None:
        super().__init__()
        self.attention, self.head = tw.nn.Attention(dim, heads), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x)).mean(dim=1)


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """For each parameter its gradient for each sample, one more dimension in front."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x, y = Classifier(dim=32, heads=4, classes=5), torch.randn(16, 20, 32), torch.randint(5, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        grads = sample_gradients(model, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)  # one for each sample
        factors = (CLIP / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            clipped = torch.einsum("n,n...->...", factors, grads[name])
            p.grad = (clipped + NOISE * CLIP * torch.randn_like(p)) / len(x)
        optimizer.step()
        loss = nn.functional.cross_entropy(model(x), y)
        print(f"step {step}: loss {loss.item():.4f}, norms {norms.min().item():.2f} to {norms.max().item():.2f}")
