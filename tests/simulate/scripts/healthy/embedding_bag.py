# style: nn.EmbeddingBag with offsets, a collate that builds them, ReduceLROnPlateau
# steps: 4
# expect: nothing

import torch
from torch import nn
from torch.utils.data import DataLoader


def collate(batch):
    labels = torch.tensor([label for label, _ in batch])
    offsets = torch.tensor([0] + [len(text) for _, text in batch[:-1]]).cumsum(0)
    return labels, torch.cat([text for _, text in batch]), offsets


class TextClassifier(nn.Module):
    def __init__(self, vocab, width, classes):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab, width, mode="mean")
        self.fc = nn.Linear(width, classes)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rows = [(i % 3, torch.randint(0, 60, (4 + i % 5,))) for i in range(24)]
loader = DataLoader(rows, batch_size=12, collate_fn=collate)
model = TextClassifier(60, 16, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

for epoch in range(2):
    total = torch.zeros(1, device=device)
    for labels, text, offsets in loader:
        labels, text, offsets = labels.to(device), text.to(device), offsets.to(device)
        loss = nn.functional.cross_entropy(model(text, offsets), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    scheduler.step(total.item())
    print(epoch, total.item() / len(loader))
