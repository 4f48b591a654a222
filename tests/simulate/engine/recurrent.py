"""LSTM and GRU, packed sequences, checkpointing of activations."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(32, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        out, (h, c) = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        assert tuple(out.shape) == (3, 7, 32) and tuple(h.shape) == (4, 3, 16), out.shape
        out, _ = self.gru(out)
        assert out.stride() == (8, 3 * 8, 1), out.stride()  # cuDNN has the first step of all first, whoever asks
        return checkpoint(self.head, out, use_reentrant=False)


device = torch.device("cuda")
model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    tokens = torch.randint(50, (3, 7)).to(device)
    optimizer.zero_grad()
    scores = model(tokens, torch.tensor([7, 5, 2]))
    loss = nn.functional.cross_entropy(scores.reshape(-1, 5), torch.randint(5, (21,), device=device))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len({p.grad.untyped_storage()._cdata for p in model.gru.parameters()}) == 1  # parts of one buffer
    optimizer.step()
