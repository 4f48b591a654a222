# style: torch.func: gradients of every sample by vmap, clipped one by one
# steps: 3
# expect: nothing

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def one_loss(parameters, x, y):
    logits = functional_call(model, parameters, (x.unsqueeze(0),))
    return nn.functional.cross_entropy(logits, y.unsqueeze(0))


per_sample = vmap(grad(one_loss), in_dims=(None, 0, 0))

for _ in range(3):
    x = torch.randn(12, 5, device=device)
    y = (x[:, 0] > 0).long()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = per_sample(parameters, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
    factor = (1.0 / norms).clamp(max=1.0)
    for name, p in model.named_parameters():
        g = gradients[name]
        p.grad = (g * factor.view(-1, *[1] * (g.dim() - 1))).mean(0)
    optimizer.step()
print("largest norm", norms.max().item())
