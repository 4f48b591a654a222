# style: an IterableDataset and a GRU whose hidden state is carried from batch to batch
# steps: 6
# expect: nothing

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Ticks(IterableDataset):
    def __init__(self, chunks, length=12):
        self.chunks = chunks
        self.length = length

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(self.chunks):
            walk = torch.randn(self.length + 1, 4, generator=generator).cumsum(0)
            yield walk[:-1], walk[1:]


class Forecaster(nn.Module):
    def __init__(self, features=4, hidden=16, layers=2):
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.rnn = nn.GRU(features, hidden, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden, features)

    def begin(self, batch):
        return next(self.parameters()).new_zeros(self.layers, batch, self.hidden)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.out(y), h


device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model = Forecaster().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    h = model.begin(4)
    for x, y in DataLoader(Ticks(12), batch_size=4):
        prediction, h = model(x.to(device), h.detach())
        loss = nn.functional.l1_loss(prediction, y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
