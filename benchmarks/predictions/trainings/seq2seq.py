"""Translation by LSTMs: the decoder looks at the encoder's states, word by word: fp32, Adam with clipped gradients."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
vocabulary, width, source_length, target_length = 16000, 512, 50, 40


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(vocabulary, width, padding_idx=0), nn.Dropout(0.2)
        self.cells = nn.LSTM(width, width, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * width, width)

    def forward(self, source):
        states, (last, _) = self.cells(self.drop(self.words(source)))
        return states, torch.tanh(self.bridge(torch.cat([last[-2], last[-1]], dim=1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)
        self.energy = nn.Linear(width, 1, bias=False)

    def forward(self, hidden, keys, states, padding):
        scores = self.energy(torch.tanh(self.query(hidden)[:, None] + keys)).squeeze(2)
        weights = F.softmax(scores.masked_fill(padding, float("-inf")), dim=1)
        return torch.bmm(weights[:, None], states).squeeze(1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(vocabulary, width, padding_idx=0), nn.Dropout(0.2)
        self.attention = Attention()
        self.cell = nn.LSTMCell(3 * width, width)
        self.head = nn.Linear(3 * width, vocabulary)

    def forward(self, target, states, hidden, padding):
        words, keys, memory, outputs = self.drop(self.words(target)), self.attention.key(states), hidden, []
        for word in words.unbind(1):
            seen = self.attention(hidden, keys, states, padding)
            hidden, memory = self.cell(torch.cat([word, seen], dim=1), (hidden, memory))
            outputs.append(torch.cat([hidden, seen], dim=1))
        return self.head(self.drop(torch.stack(outputs, dim=1)))


encoder, decoder = Encoder().to(device), Decoder().to(device)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=0)
sources = torch.randint(1, vocabulary, (args.batch, source_length))
targets = torch.randint(1, vocabulary, (args.batch, target_length + 1))

for step in range(args.steps):
    source, target = sources.to(device), targets.to(device)
    states, hidden = encoder(source)
    scores = decoder(target[:, :-1], states, hidden, source == 0)
    loss = criterion(scores.view(-1, vocabulary), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
