# style: a Trainer class, batches as dictionaries
# steps: 8
# expect: nothing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, n=32):
        self.tokens = torch.randint(0, 100, (n, 12))
        self.extra = torch.randn(n, 4)
        self.labels = torch.randint(0, 2, (n,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"tokens": self.tokens[i], "extra": self.extra[i], "label": self.labels[i]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(20, 2)

    def forward(self, batch):
        pooled = self.embedding(batch["tokens"]).mean(1)
        return self.head(torch.cat([pooled, batch["extra"]], dim=1))


class Trainer:
    def __init__(self, model, loader, lr=1e-2):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.loader = loader
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, batch):
        batch = {key: value.to(self.device) for key, value in batch.items()}
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(batch), batch["label"])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, epochs):
        for epoch in range(epochs):
            losses = [self.step(batch) for batch in self.loader]
            print(epoch, torch.stack(losses).mean().item())


Trainer(Classifier(), DataLoader(Reviews(), batch_size=8, shuffle=True)).fit(2)
