# style: sentences of any length, a custom collate function, an LSTM over packed sequences
# steps: 4
# expect: nothing

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


def collate(samples):
    texts, labels = zip(*samples)
    lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class SentenceLSTM(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(output.max(dim=1).values)


random.seed(0)
samples = [(torch.randint(1, 40, (random.randint(3, 9),)), random.randrange(3)) for _ in range(32)]
loader = DataLoader(samples, batch_size=8, shuffle=True, collate_fn=collate)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = SentenceLSTM().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for ids, lengths, labels in loader:
    ids, labels = ids.to(device), labels.to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids, lengths), labels)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
print(f"{loss.item():.3f}")
