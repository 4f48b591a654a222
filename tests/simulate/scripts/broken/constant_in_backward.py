# why: the window is made on the CPU inside a backward of one's own, where it meets CUDA gradients.
# twin: custom_function.py
# steps: 4
# expect: mixed-devices error at here

import torch
from torch import nn


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        ctx.levels = levels
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        window = torch.ones(x.shape[-1])
        return grad * window * (x.abs() <= 1), None  # <- here


class QuantLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Quantise.apply(self.weight, 7.0), self.bias)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(QuantLinear(10, 20), nn.Hardtanh(), QuantLinear(20, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)

torch.manual_seed(3)
inputs = torch.randn(32, 10, device=device)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
for part in torch.arange(32).split(8):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
    loss.backward()
    optimizer.step()
print("weights used:", Quantise.apply(model[0].weight, 7.0).unique().numel(), "loss", loss.item())
