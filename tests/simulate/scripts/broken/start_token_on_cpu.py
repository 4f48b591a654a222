# why: the first token is made on the CPU; the decoder's embedding table is on CUDA.
# twin: seq2seq_teacher_forcing.py
# steps: 3
# expect: mixed-devices error at here

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
        hidden = self.cell(self.embed(token), hidden)  # <- here
        return self.out(hidden), hidden


def run(encoder, decoder, source, target, forcing=0.5):
    hidden = encoder(source)
    token = torch.full((len(source),), SOS)
    loss = 0
    for t in range(target.size(1)):
        logits, hidden = decoder(token, hidden)
        loss = loss + nn.functional.cross_entropy(logits, target[:, t])
        token = target[:, t] if random.random() < forcing else logits.argmax(1)
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
