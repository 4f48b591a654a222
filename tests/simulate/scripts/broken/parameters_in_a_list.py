# why: parameters in a plain list are neither moved nor trained; torch.cat refuses them.
# twin: vit_prompts.py
# steps: 3
# expect: mixed-devices error at here

import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self, *, size=16, patch=4, width=32, depth=2, classes=5):
        super().__init__()
        count = (size // patch) ** 2
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, count + 1, width) * 0.02)
        self.prompts = [nn.Parameter(torch.randn(1, 2, width)) for _ in range(depth)]
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        for prompt, block in zip(self.prompts, self.blocks):
            y = block(torch.cat([x, prompt.expand(len(x), -1, -1)], dim=1))  # <- here
            x = y[:, : x.size(1)]
        return self.head(x[:, 0])


def train(*, device, steps):
    model = ViT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(steps):
        images = torch.randn(6, 3, 16, 16, device=device)
        labels = torch.randint(5, (6,), device=device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(train(device="cuda" if torch.cuda.is_available() else "cpu", steps=3))
