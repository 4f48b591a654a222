# why: the prior's tensors are plain attributes and stay on the CPU; the divergence from a CUDA posterior is refused.
# twin: bayes_prior.py
# steps: 4
# expect: mixed-devices error at here, fix register_buffer

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence


class BayesLinear(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(cout, cin) * 0.1)
        self.rho = nn.Parameter(torch.full((cout, cin), -3.0))
        self.zero = torch.zeros(cout, cin)
        self.one = torch.ones(cout, cin)

    def forward(self, x):
        posterior = Normal(self.mean, nn.functional.softplus(self.rho), validate_args=False)
        self.kl = kl_divergence(posterior, Normal(self.zero, self.one, validate_args=False)).sum()  # <- here
        return x @ posterior.rsample().T


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layers = nn.ModuleList([BayesLinear(4, 12), BayesLinear(12, 1)]).to(device)
optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)

for _ in range(4):
    x = torch.randn(20, 4, device=device)
    y = x[:, :1] - x[:, 1:2]
    out = layers[1](torch.relu(layers[0](x)))
    loss = (out - y).square().mean() + 1e-3 * sum(layer.kl for layer in layers)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
