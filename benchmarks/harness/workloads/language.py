"""Language: an LSTM that guesses the next word, a Llama of Hugging Face, and BERT on texts of many lengths."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW
from torch.utils.data import Dataset, TensorDataset

from harness.data import TextDataset, tokens
from harness.packages import require
from harness.workloads.parts import Scale, Workload
from harness.workloads.reference import next_token

WORDS = 33_278  # of WikiText-2, on which such LSTMs are taught


def lstm_workload(scale: Scale) -> Workload:
    """Two layers of 650 on 8,192 sequences of 64 tokens, batches of 64, dropout of 0.2."""
    count, batch, length = scale.pick(8_192, 128, 24), scale.pick(64, 16, 8), scale.pick(64, 32, 8)
    width, words = scale.pick(650, 128, 16), scale.pick(WORDS, 2_000, 600)
    drawn = tokens(count, length + 1, words, scale.seed)
    return Workload(
        name="lstm",
        unit="sequences",
        dataset=TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()),
        items=count,
        batch=batch,
        network=partial(LSTMModel, words, width),
        optimize=partial(Adam, lr=1e-3),
        objective=next_token,
        note=scale.note(f"{count:,} sequences of {length} tokens in batches of {batch}, {width} wide"),
    )


class LSTMModel(nn.Module):
    """Tokens (n, length) to scores (n, length, vocabulary)."""

    def __init__(self, words: int, width: int, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.tokens(tokens)))
        scores: Tensor = self.head(self.dropout(hidden))
        return scores


def llama_workload(scale: Scale) -> Workload:
    """A Llama of 120 million parameters on 8x512 tokens; it computes its own loss."""
    transformers = require("transformers")
    count, batch, length = scale.pick(256, 32, 8), scale.pick(8, 4, 4), scale.pick(512, 128, 16)
    width, layers = scale.pick(768, 192, 32), scale.pick(10, 3, 2)
    config = transformers.LlamaConfig(
        vocab_size=scale.pick(32_000, 4_000, 600),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=scale.pick(12, 3, 2),
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Workload(
        name="llama",
        unit="tokens",
        units_per_item=length,
        dataset=TextDataset(tokens(count, length, config.vocab_size, scale.seed)),
        items=count,
        batch=batch,
        network=partial(transformers.LlamaForCausalLM, config),
        optimize=partial(AdamW, lr=3e-4),
        note=scale.note(f"a small one: {layers} layers, {width} wide, {batch}x{length} tokens"),
    )


def bert_workload(scale: Scale) -> Workload:
    """BERT base sorts 2,048 texts of 16 to 256 tokens, padded to the longest of their batch of 32; dropout is on."""
    transformers = require("transformers")
    count, batch, longest = scale.pick(2_048, 64, 16), scale.pick(32, 8, 4), scale.pick(256, 64, 24)
    width, layers = scale.pick(768, 128, 16), scale.pick(12, 2, 2)
    config = transformers.BertConfig(
        vocab_size=scale.pick(30_522, 4_000, 600),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=scale.pick(12, 2, 2),
        max_position_embeddings=longest,
    )
    return Workload(
        name="bert",
        unit="sequences",
        dataset=RaggedTextDataset(count, longest, config.vocab_size, scale.seed),
        items=count,
        batch=batch,
        network=partial(transformers.BertForSequenceClassification, config),
        optimize=partial(AdamW, lr=5e-5),
        workers=scale.pick(2, 2, 0),
        collate=padded,
        note=scale.note(f"a small one: {layers} layers, {width} wide, up to {longest} tokens in batches of {batch}"),
    )


class RaggedTextDataset(Dataset[dict[str, Tensor]]):
    """Texts of 16 tokens and more in two languages, and which one each is in; one answer in five is wrong."""

    SHORTEST = 16

    def __init__(self, count: int, longest: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(self.SHORTEST, longest + 1, (count,), generator=generator).tolist()
        languages = torch.stack([tokens(count, longest, vocabulary, seed=2 * seed + which) for which in (0, 1)])
        which = torch.randint(0, 2, (count,), generator=generator)
        self.texts = languages[which, torch.arange(count)]
        self.labels = which ^ (torch.rand(count, generator=generator) < 0.2).long()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index, : self.lengths[index]], "labels": self.labels[index]}


def padded(items: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A batch as long as its longest text."""
    texts = [item["input_ids"] for item in items]
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([item["labels"] for item in items]),
    }
