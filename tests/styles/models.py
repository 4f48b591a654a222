"""Models by what they are called with and what they return."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import hotloop

from .style import Pair, adamw, close_style, mlp, numbers, pairs, sgd, style, update


@dataclass
class Output:
    """As the models of Hugging Face return."""

    logits: Tensor
    loss: Tensor | None = None


class WithLoss(NamedTuple):
    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """Computes its loss where it is given targets, and returns what a style wants of it."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.layers, self.returned = mlp(), returned

    def forward(self, x, y=None):
        logits = self.layers(x)
        return self.returned(logits, None if y is None else F.cross_entropy(logits, y))


def own_loss(returned: Any, *, keywords: bool = False) -> Pair:
    """A model that needs neither `loss=` nor `objective=`."""
    model, batches = Classifier(returned), pairs()
    optimizer = sgd(model)
    given = [{"x": x, "y": y} for x, y in batches] if keywords else batches

    def ours():
        hotloop.Loop(model, optimizer).fit(given, epochs=2)

    def twin():
        for _ in range(2):
            for x, y in batches:
                update(optimizer, F.cross_entropy(model.layers(x), y))

    return ours, twin, (model, optimizer)


@style
def logits_and_loss() -> Pair:
    return own_loss(lambda logits, loss: (logits, loss))


@style
def loss_and_logits() -> Pair:
    return own_loss(lambda logits, loss: (loss, logits))


@style
def bare_loss() -> Pair:
    return own_loss(lambda logits, loss: loss)


@style
def dict_with_loss() -> Pair:
    return own_loss(lambda logits, loss: {"logits": logits, "loss": loss})


@style
def dataclass_with_loss() -> Pair:
    return own_loss(Output)


@style
def namedtuple_with_loss() -> Pair:
    return own_loss(lambda logits, loss: WithLoss(loss, logits))


@style
def keywords_and_dataclass() -> Pair:
    """`model(**batch).loss`."""
    return own_loss(Output, keywords=True)


@style
def keywords_and_tuple() -> Pair:
    """`logits, loss = model(**batch)`."""
    return own_loss(lambda logits, loss: (logits, loss), keywords=True)


@style
def keywords_and_bare_loss() -> Pair:
    """`loss = model(**batch)`."""
    return own_loss(lambda logits, loss: loss, keywords=True)


@close_style
def own_loss_that_accumulates() -> Pair:
    """A model that returns its loss, two batches to an update."""
    model, batches = Classifier(lambda logits, loss: loss), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, accumulate=2).fit(batches)

    def twin():
        for (x, y), (more, their) in zip(batches[::2], batches[1::2], strict=True):
            update(optimizer, model(torch.cat([x, more]), torch.cat([y, their])))

    return ours, twin, model


@style
def own_loss_with_validation() -> Pair:
    """`(logits, loss)` once more, and after each epoch its validation loss and accuracy."""
    model, batches, held_out = Classifier(lambda logits, loss: (logits, loss)), pairs(), pairs(10)
    optimizer = sgd(model)
    scores: list[float] = []

    def ours():
        metrics = {"accuracy": hotloop.metrics.accuracy}
        report = hotloop.Loop(model, optimizer).fit(batches, epochs=2, validate=held_out, metrics=metrics)
        scores.extend(epoch.metrics["accuracy"] for epoch in report.epochs)

    def twin():
        for _ in range(2):
            for x, y in batches:
                update(optimizer, model(x, y)[1])
            with torch.no_grad():
                right = torch.cat([model(x)[0].argmax(1) == y for x, y in held_out])
            scores.append(right.double().mean().item())

    return ours, twin, (model, scores)


@style
def whole_batch() -> Pair:
    """`model(batch)`, which takes it apart itself."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, batch):
            x, y = batch
            return F.cross_entropy(self.layers(x), y)

    model, batches = Model(), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, model(batch))

    return ours, twin, model


@style
def logits_and_criterion() -> Pair:
    """A model that returns `.logits`, and a criterion for them."""
    model, batches = Classifier(Output), pairs()
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x).logits, y))

    return ours, twin, model


@style
def hugging_face_with_another_loss() -> Pair:
    """Dicts with `labels`, for a model that would have a loss of its own."""

    class Model(Classifier):
        def forward(self, input_ids, attention_mask, labels=None):
            return super().forward(input_ids * attention_mask, labels)

    model, criterion = Model(Output), nn.CrossEntropyLoss(label_smoothing=0.2)
    batches = [{"input_ids": x, "attention_mask": (x > -1).float(), "labels": y} for x, y in pairs()]
    optimizer = adamw(model)

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, criterion(model(**batch).logits, batch["labels"]))

    return ours, twin, model


@style
def several_inputs() -> Pair:
    """Batches `(picture, table, target)`."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.picture, self.table = nn.Conv2d(1, 2, 3), mlp(outputs=8)

        def forward(self, picture, table):
            return self.picture(picture).flatten(1) + self.table(table)

    model = Model()
    batches = [(torch.randn(5, 1, 4, 4), x, y) for x, y in pairs()]
    optimizer, criterion = adamw(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for picture, table, y in batches:
            update(optimizer, criterion(model(picture, table), y))

    return ours, twin, model


@style
def tuple_of_outputs() -> Pair:
    """Logits and features, for a criterion that takes both."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            features = self.body(x).tanh()
            return self.head(features), features

    def criterion(output, target):
        logits, features = output
        return F.cross_entropy(logits, target) + 0.01 * features.square().mean()

    model, batches = Model(), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def several_targets() -> Pair:
    """A dict of targets, and a criterion that returns a dict of losses."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kind, self.size = mlp(), mlp(outputs=1)

        def forward(self, x):
            return {"kind": self.kind(x), "size": self.size(x).squeeze(1)}

    def criterion(output, target):
        return {
            "kind": F.cross_entropy(output["kind"], target["kind"]),
            "size": F.mse_loss(output["size"], target["size"]),
        }

    model = Model()
    batches = [(x, {"kind": y, "size": x.norm(dim=1)}) for x, y in pairs()]
    optimizer = adamw(model)

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            losses = criterion(model(x), y)
            update(optimizer, losses["kind"] + losses["size"])

    return ours, twin, model


@style
def weight_tying() -> Pair:
    """One matrix is the embedding and the head of a language model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.rnn(self.embedding(tokens))[0]).transpose(1, 2)

    model, texts = Model(), torch.randint(11, (4, 3, 7))
    optimizer = adamw(model)

    def ours():
        batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in texts]
        hotloop.Loop(model, optimizer, nn.CrossEntropyLoss()).fit(batches)
        assert model.head.weight is model.embedding.weight

    def twin():
        for tokens in texts:
            update(optimizer, F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))

    return ours, twin, model


@style
def packed_sequences() -> Pair:
    """An LSTM over sequences of many lengths, which `collate_fn` hands over beside them."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.head(states.sum(1) / lengths[:, None])

    def collate(items):
        sequences, labels = zip(*items, strict=True)
        lengths = torch.tensor([len(each) for each in sequences])
        return pad_sequence(list(sequences), batch_first=True), lengths, torch.tensor(labels)

    items = [(torch.randn(length, 2), length % 2) for length in (3, 6, 2, 5, 4, 1, 7, 3)]
    data = DataLoader(items, 4, shuffle=True, collate_fn=collate)
    model = Model()
    optimizer, criterion = adamw(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for x, lengths, y in data:
                update(optimizer, criterion(model(x, lengths), y))

    return ours, twin, model


@style
def bags_of_words() -> Pair:
    """All words of a batch in one tensor, and where each text begins."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(20, 6), nn.Linear(6, 2)

        def forward(self, words, offsets):
            return self.head(self.bag(words, offsets))

    def collate(items):
        texts, labels = zip(*items, strict=True)
        lengths = torch.tensor([0, *(len(text) for text in texts[:-1])])
        return torch.cat(texts), lengths.cumsum(0), torch.tensor(labels)

    items = [(torch.randint(20, (length,)), length % 2) for length in (3, 1, 4, 2, 5, 6)]
    data = DataLoader(items, 2, shuffle=True, collate_fn=collate)
    model = Model()
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(data)

    def twin():
        for words, offsets, y in data:
            update(optimizer, criterion(model(words, offsets), y))

    return ours, twin, model


@style
def batchnorm_and_dropout() -> Pair:
    """Layers that draw random numbers and keep statistics, with an evaluation after each epoch."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    batches, held_out = pairs(), pairs(10)
    optimizer, criterion = adamw(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches, epochs=2, validate=held_out)

    def twin():
        for _ in range(2):
            model.train()
            for x, y in batches:
                update(optimizer, criterion(model(x), y))
            model.eval()
            with torch.no_grad():
                sum(criterion(model(x), y) for x, y in held_out)
        model.train()

    return ours, twin, (model, optimizer)


@style
def lora_by_hand() -> Pair:
    """A frozen network, and a small correction of one of its layers."""

    class LoRA(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features)

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    model, batches = mlp().requires_grad_(False), pairs()
    model[2] = LoRA(model[2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    criterion = nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def own_autograd_function() -> Pair:
    """A forward and a backward pass by hand."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() < 1)

    class Binary(nn.Module):
        def forward(self, x):
            return Straight.apply(x)

    model, batches = nn.Sequential(nn.Linear(3, 8), Binary(), nn.Linear(8, 1)), numbers()
    optimizer, criterion = adamw(model), nn.HuberLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def state_between_batches() -> Pair:
    """Truncated backpropagation through time: the hidden state goes on from batch to batch, without its graph."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head, self.hidden = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1), None

        def forward(self, x):
            states, hidden = self.rnn(x, self.hidden)
            self.hidden = hidden.detach()
            return self.head(states)

    model, wave = Model(), torch.randn(2, 25, 1).cumsum(1)
    batches = [(wave[:, i : i + 6], wave[:, i + 1 : i + 7]) for i in range(0, 24, 6)]
    optimizer, criterion = adamw(model), nn.MSELoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def two_modules() -> Pair:
    """An encoder and a decoder that were two variables: a `ModuleList` holds both."""
    encoder, decoder, batches = nn.Linear(3, 2), nn.Linear(2, 3), list(torch.randn(4, 5, 3))
    optimizer = sgd(encoder, decoder)

    def ours():
        both = nn.ModuleList([encoder, decoder])
        objective = lambda both, x: F.mse_loss(both[1](both[0](x).tanh()), x)  # noqa: E731
        hotloop.Loop(both, optimizer, objective=objective).fit(batches)

    def twin():
        for x in batches:
            update(optimizer, F.mse_loss(decoder(encoder(x).tanh()), x))

    return ours, twin, (encoder, decoder)


@style
def no_module_at_all() -> Pair:
    """A picture is what is trained, as in style transfer: a `ParameterList` is the model."""
    picture, network = nn.Parameter(torch.randn(1, 3)), mlp().requires_grad_(False)
    wanted = [torch.randn(1, 2) for _ in range(4)]
    optimizer = torch.optim.Adam([picture], 0.1)

    def ours():
        objective = lambda model, want: F.mse_loss(network(model[0]), want)  # noqa: E731
        hotloop.Loop(nn.ParameterList([picture]), optimizer, objective=objective).fit(wanted)

    def twin():
        for want in wanted:
            update(optimizer, F.mse_loss(network(picture), want))

    return ours, twin, picture


@style
def pruned() -> Pair:
    """Masks of `torch.nn.utils.prune` stay while the rest is trained."""
    model, batches = mlp(), pairs()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def graph_network() -> Pair:
    """One graph is the only batch, with a sparse matrix of its edges and a mask of its labelled nodes."""

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x, edges):
            return self.second(edges @ self.first(edges @ x).relu())

    model, x = GCN(), torch.randn(10, 3)
    edges = (torch.rand(10, 10) < 0.3).float().add(torch.eye(10)).to_sparse()
    graph = {"x": x, "edges": edges, "y": (x.sum(1) > 0).long(), "known": torch.arange(10) < 6}
    optimizer = adamw(model)

    def objective(model, graph):
        known = graph["known"]
        return F.cross_entropy(model(graph["x"], graph["edges"])[known], graph["y"][known])

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit([graph], epochs=5)

    def twin():
        for _ in range(5):
            update(optimizer, objective(model, graph))

    return ours, twin, model
