# why: asking after each token whether all sentences are finished waits for the device each time.
# twin: seq2seq_teacher_forcing.py
# steps: 3
# expect: sync bool or item at decode, times 3

import random

import torch
from torch import nn

SOS, EOS, VOCAB, WIDTH = 0, 1, 20, 16
random.seed(5)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids):
        return self.gru(self.embed(ids))[1][0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, token, hidden):
        hidden = self.cell(self.embed(token), hidden)
        return self.out(hidden), hidden


def run(encoder, decoder, source, target, forcing=0.5):
    hidden = encoder(source)
    token = torch.full((len(source),), SOS, device=source.device)
    loss = 0
    for t in range(target.size(1)):
        logits, hidden = decoder(token, hidden)
        loss = loss + nn.functional.cross_entropy(logits, target[:, t])
        token = target[:, t] if random.random() < forcing else logits.argmax(1)
        if (token == EOS).all():  # <- decode
            break
    return loss / target.size(1)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
encoder, decoder = Encoder().to(device), Decoder().to(device)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(3):
    source = torch.randint(2, VOCAB, (6, 5), device=device)
    loss = run(encoder, decoder, source, source.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
