"""BERT-base that guesses masked words, padding masked: fp32, AdamW, a DataLoader."""

import argparse

import torch
import torch.nn.functional as F
from models.bert import BERT
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = BERT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
words = torch.randint(5, 30522, (args.batch * args.steps, 512))
lengths = torch.randint(256, 513, (args.batch * args.steps,))
attention = (torch.arange(512) < lengths[:, None]).long()
hidden = (torch.rand(words.shape) < 0.15) & attention.bool()
labels = words.masked_fill(~hidden, -100)
words = (words * attention).masked_fill(hidden, 103)
loader = DataLoader(TensorDataset(words, attention, labels), batch_size=args.batch, shuffle=True)

model.train()
for step, batch in enumerate(loader):
    words, attention, labels = (part.to(device) for part in batch)
    scores = model(words, attention)
    loss = F.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
