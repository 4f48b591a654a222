# why: the token ids stay on the CPU, and the embedding table is on CUDA.
# twin: bert_classifier.py
# steps: 3
# expect: mixed-devices error at here

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=3,
)
model = BertForSequenceClassification(config).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)


def encode(i):
    length = 6 + i % 6
    ids = torch.zeros(12, dtype=torch.long)
    ids[:length] = torch.randint(1, 100, (length,))
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(i % 3)}


loader = DataLoader([encode(i) for i in range(24)], batch_size=8, shuffle=True)
for batch in loader:
    mask, labels = batch["attention_mask"].to(device), batch["labels"].to(device)
    outputs = model(input_ids=batch["input_ids"], attention_mask=mask, labels=labels)  # <- here
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", outputs.loss.item())
