# why: the hook of each layer reads a value back: three waits in each step.
# twin: hooks_statistics.py
# steps: 5
# expect: sync item at hook, times 15

from collections import defaultdict

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
means = defaultdict(list)


def watch(name):
    def hook(module, inputs, output):
        means[name].append(output.detach().abs().mean().item())  # <- hook

    return hook


model = nn.Sequential(nn.Linear(14, 28), nn.Sigmoid(), nn.Linear(28, 28), nn.Sigmoid(), nn.Linear(28, 1)).to(device)
handles = [
    layer.register_forward_hook(watch(f"{i}.{type(layer).__name__}"))
    for i, layer in enumerate(model)
    if isinstance(layer, nn.Linear)
]
model[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))
optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)

x = torch.randn(64, 14, device=device)
y = x.prod(1, keepdim=True).sign()
for step in range(5):
    optimizer.zero_grad()
    loss = nn.functional.soft_margin_loss(model(x), y)
    loss.backward()
    optimizer.step()

for handle in handles:
    handle.remove()
for name, values in means.items():
    print(name, [round(value, 3) for value in values])
