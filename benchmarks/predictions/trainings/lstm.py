"""A language model of two LSTM layers that carries its state along: fp32, SGD with clipped gradients."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
vocabulary, width, length = 10000, 1024, 128


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.cells = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words, state):
        x, state = self.cells(self.drop(self.words(words)), state)
        return self.head(self.drop(x)), state


model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
criterion = nn.CrossEntropyLoss()
words = torch.randint(0, vocabulary, (args.batch, length + 1))
state = tuple(torch.zeros(2, args.batch, width, device=device) for _ in range(2))

for step in range(args.steps):
    text = words.to(device)
    state = tuple(part.detach() for part in state)
    scores, state = model(text[:, :-1], state)
    loss = criterion(scores.reshape(-1, vocabulary), text[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
