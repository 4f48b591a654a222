"""How a run goes: optimizers, clipping, schedules, hooks, loops of one's own."""

import copy
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hotloop

from .style import Pair, adamw, close_style, loader, mlp, numbers, pairs, sgd, style, update

CRITERION = nn.CrossEntropyLoss()


# Optimizers


@style
def parameter_groups() -> Pair:
    """The body learns more slowly than the head, and biases do not decay."""
    model, batches = mlp(), pairs()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight], "lr": 1e-3},
            {"params": [model[2].weight]},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )

    def ours():
        hotloop.Loop(model, optimizer, CRITERION).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, CRITERION(model(x), y))

    return ours, twin, (model, optimizer)


@style
def two_optimizers_for_one_loss() -> Pair:
    """Sparse gradients of an embedding have an optimizer of their own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, words):
            return self.head(self.embedding(words).mean(1))

    model, batches = Model(), [(torch.randint(12, (5, 3)), torch.randint(2, (5,))) for _ in range(4)]
    sparse, dense = torch.optim.SparseAdam(model.embedding.parameters(), 1e-2), adamw(model.head)

    def ours():
        hotloop.Loop(model, [sparse, dense], CRITERION).fit(batches)

    def twin():
        for x, y in batches:
            model.zero_grad()
            CRITERION(model(x), y).backward()
            sparse.step()
            dense.step()

    return ours, twin, (model, sparse, dense)


@style
def muon_and_adamw() -> Pair:
    """Matrices by Muon, the rest by AdamW."""
    model, batches = mlp(), pairs()
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)

    def ours():
        hotloop.Loop(model, [matrices, rest], CRITERION).fit(batches)

    def twin():
        for x, y in batches:
            model.zero_grad()
            CRITERION(model(x), y).backward()
            matrices.step()
            rest.step()

    return ours, twin, (model, matrices, rest)


@style
def lbfgs() -> Pair:
    """An optimizer that computes the loss several times in a step."""
    model, batches = mlp(outputs=1), numbers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def ours():
        hotloop.Loop(model, optimizer, nn.MSELoss()).fit(batches)

    def twin():
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    return ours, twin, model


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, written as people write it: two closures around SGD."""

    def __init__(self, parameters, lr=0.1, rho=0.05):
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr)

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        weights = self.param_groups[0]["params"]
        before = [p.clone() for p in weights]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        closure()
        for p, old in zip(weights, before, strict=True):
            p.copy_(old)
        self.base.step()
        return loss


@style
def sharpness_aware() -> Pair:
    model, batches = mlp(), pairs()
    optimizer = SAM(model.parameters())

    def ours():
        hotloop.Loop(model, optimizer, CRITERION).fit(batches)

    def twin():
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = CRITERION(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    return ours, twin, model


@close_style
def gradient_accumulation() -> Pair:
    """Two batches to an update, and a single one at the end of the epoch: its mean is over what it has."""
    model, batches = mlp(), pairs(25)
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, accumulate=2).fit(batches)

    def twin():
        for window in (batches[:2], batches[2:4], batches[4:]):
            optimizer.zero_grad()
            for x, y in window:
                (CRITERION(model(x), y) / len(window)).backward()
            optimizer.step()

    return ours, twin, (model, optimizer)


@style
def clipped_norm() -> Pair:
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, clip_norm=0.1).fit(batches)

    def twin():
        for x, y in batches:
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return ours, twin, model


@style
def clipped_values() -> Pair:
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, clip_value=0.02).fit(batches)

    def twin():
        for x, y in batches:
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()

    return ours, twin, model


@style
def gradient_noise() -> Pair:
    """Gradients are changed between the backward pass and the update, by a hook of the optimizer."""
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def add_noise():
        for p in model.parameters():
            p.grad += 0.01 * torch.randn_like(p)

    def ours():
        optimizer.register_step_pre_hook(lambda *_: add_noise())
        hotloop.Loop(model, optimizer, CRITERION).fit(batches)

    def twin():
        for x, y in batches:
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            add_noise()
            optimizer.step()

    return ours, twin, model


# Schedules


@style
def one_cycle() -> Pair:
    """After each step."""
    model, data = mlp(), loader()
    optimizer = sgd(model)
    scheduler = OneCycleLR(optimizer, 0.2, epochs=2, steps_per_epoch=len(data))

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, scheduler=scheduler).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
                scheduler.step()

    return ours, twin, (model, optimizer)


@style
def step_decay() -> Pair:
    """After each epoch."""
    model, data = mlp(), loader()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, gamma=0.5)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, scheduler=scheduler, schedule="epoch").fit(data, epochs=3)

    def twin():
        for _ in range(3):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
            scheduler.step()

    return ours, twin, (model, optimizer)


@style
def warm_up_by_step_and_decay_by_epoch() -> Pair:
    """Two schedulers, each in its rhythm."""
    model, data = mlp(), loader()
    optimizer = sgd(model)
    warm_up, decay = LinearLR(optimizer, 0.1, total_iters=4), ExponentialLR(optimizer, 0.7)

    def ours():
        schedulers = {"step": warm_up, "epoch": decay}
        hotloop.Loop(model, optimizer, CRITERION, scheduler=schedulers).fit(data, epochs=3)

    def twin():
        for _ in range(3):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
                warm_up.step()
            decay.step()

    return ours, twin, (model, optimizer)


@close_style
def warm_up_and_cosine() -> Pair:
    """In one line, and as PyTorch's three schedulers, whose rates are the product of their steps."""
    model, data = mlp(), loader()
    optimizer = adamw(model)

    def ours():
        scheduler = hotloop.WarmupCosine(optimizer, 3 * len(data), warmup=3)
        hotloop.Loop(model, optimizer, CRITERION, scheduler=scheduler).fit(data, epochs=3)

    def twin():
        parts = [LinearLR(optimizer, 1 / 4, total_iters=3), CosineAnnealingLR(optimizer, 3 * len(data) - 3)]
        scheduler = SequentialLR(optimizer, parts, [3])
        for _ in range(3):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
                scheduler.step()

    return ours, twin, model


@style
def plateau() -> Pair:
    """The rate falls where the validation does not improve."""
    model, data, held_out = mlp(), loader(), pairs(10)
    optimizer = sgd(model, lr=2.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION, scheduler=scheduler).fit(data, epochs=5, validate=held_out)
        assert optimizer.param_groups[0]["lr"] < 2.0

    def twin():
        for _ in range(5):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
            with torch.no_grad():
                scheduler.step(sum(float(CRITERION(model(x), y)) for x, y in held_out) / len(held_out))

    return ours, twin, (model, optimizer)


@style
def schedulers_of_two_optimizers() -> Pair:
    model, data = mlp(), loader()
    body, head = sgd(model[0]), adamw(model[2])
    schedulers = [StepLR(body, 2, gamma=0.5), ExponentialLR(head, 0.9)]

    def ours():
        hotloop.Loop(model, [body, head], CRITERION, scheduler=schedulers).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for x, y in data:
                model.zero_grad()
                CRITERION(model(x), y).backward()
                for optimizer, scheduler in zip([body, head], schedulers, strict=True):
                    optimizer.step()
                    scheduler.step()

    return ours, twin, (model, body, head)


# Hooks


@style
def moving_average() -> Pair:
    """EMA: the averaged weights begin with those after the first step."""
    model, data = mlp(), loader()
    optimizer, average = adamw(model), copy.deepcopy(model)

    def ours():
        ema = hotloop.Ema(model, decay=0.8)
        hotloop.Loop(model, optimizer, CRITERION, stateful={"ema": ema}).fit(data, epochs=2, on_step=ema)
        average.load_state_dict(ema.model.state_dict())

    def twin():
        for epoch in range(2):
            for number, (x, y) in enumerate(data):
                update(optimizer, CRITERION(model(x), y))
                with torch.no_grad():
                    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(weight, 0.2 if epoch or number else 1.0)

    return ours, twin, (model, average)


@close_style
def moving_average_with_accumulation() -> Pair:
    """The average takes in each update once, and no batch that waits for its update."""
    model, batches = mlp(), pairs(30)
    optimizer, average = sgd(model), copy.deepcopy(model)

    def ours():
        ema = hotloop.Ema(model, decay=0.8)
        hotloop.Loop(model, optimizer, CRITERION, accumulate=2).fit(batches, epochs=2, on_step=ema)
        average.load_state_dict(ema.model.state_dict())

    def twin():
        whole = [[torch.cat(each) for each in zip(*batches[i : i + 2], strict=True)] for i in (0, 2, 4)]
        for number, (x, y) in enumerate(2 * whole):
            update(optimizer, CRITERION(model(x), y))
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 0.2 if number else 1.0)

    return ours, twin, (model, average)


@style
def mean_teacher() -> Pair:
    """The average is the teacher of the model whose average it is."""
    model, data = mlp(), loader()
    teacher = AveragedModel(model, avg_fn=lambda mean, weight, count: 0.9 * mean + 0.1 * weight)
    optimizer = adamw(model)

    def objective(model, batch):
        x, y = batch
        with torch.no_grad():
            expected = teacher(x)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x), expected)

    def ours():
        loop = hotloop.Loop(model, optimizer, objective=objective, stateful={"teacher": teacher})
        loop.fit(data, epochs=2, on_step=lambda record: teacher.update_parameters(record.model))

    def twin():
        for _ in range(2):
            for batch in data:
                update(optimizer, objective(model, batch))
                teacher.update_parameters(model)

    return ours, twin, (model, teacher)


@style
def stochastic_weight_averaging() -> Pair:
    """SWA: from the second epoch on, weights are averaged after each; batch statistics at the end."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    data, averaged = loader(), AveragedModel(model)
    optimizer = sgd(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def average(record):
        if record.epoch.number > 1:
            averaged.update_parameters(record.model)

    def ours():
        loop = hotloop.Loop(
            model, optimizer, CRITERION, scheduler=scheduler, schedule="epoch", stateful={"swa": averaged}
        )
        loop.fit(data, epochs=4, on_epoch=average)
        update_bn(data, averaged)

    def twin():
        for epoch in range(1, 5):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
            if epoch > 1:
                averaged.update_parameters(model)
            scheduler.step()
        update_bn(data, averaged)

    return ours, twin, (model, averaged, optimizer)


@style
def early_stopping() -> Pair:
    """The run ends after two epochs that are no better, and the best weights come back."""
    model, data, held_out = mlp(), loader(), [(x, 1 - y) for x, y in pairs(10)]
    optimizer = adamw(model)

    def ours():
        report = hotloop.Loop(model, optimizer, CRITERION).fit(
            data, epochs=9, validate=held_out, patience=2, restore_best=True
        )
        assert len(report.epochs) == 3

    def twin():
        best, best_epoch, weights = float("inf"), 0, {}
        for epoch in range(9):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
            with torch.no_grad():
                found = sum(float(CRITERION(model(x), y)) for x, y in held_out)
            if found < best:
                best, best_epoch, weights = found, epoch, copy.deepcopy(model.state_dict())
            elif epoch - best_epoch == 2:
                break
        model.load_state_dict(weights)

    return ours, twin, model


@style
def frozen_then_unfrozen() -> Pair:
    """The head alone for an epoch, then everything."""
    model, data = mlp(), loader()
    model[0].requires_grad_(False)
    optimizer = adamw(model)

    def ours():
        def unfreeze(record):
            if record.epoch.number == 1:
                model[0].requires_grad_(True)

        hotloop.Loop(model, optimizer, CRITERION).fit(data, epochs=3, on_epoch=unfreeze)

    def twin():
        for epoch in range(3):
            model[0].requires_grad_(epoch >= 1)
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))

    return ours, twin, (model, optimizer)


@style
def group_added_later() -> Pair:
    """Or the frozen layer comes to the optimizer as a new group of parameters."""
    model, data = mlp(), loader()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])

    def thaw():
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})

    def ours():
        hotloop.Loop(model, optimizer, CRITERION).fit(
            data, epochs=3, on_epoch=lambda record: thaw() if record.epoch.number == 1 else None
        )

    def twin():
        for epoch in range(3):
            if epoch == 1:
                thaw()
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))

    return ours, twin, (model, optimizer)


@style
def rate_by_hand() -> Pair:
    """A hook sets the learning rate of the next step."""
    model, data = mlp(), loader()
    optimizer = sgd(model)

    def set_rate(step):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION).fit(data, epochs=2, on_step=lambda record: set_rate(record.step))

    def twin():
        step = 0
        for _ in range(2):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
                step += 1
                set_rate(step)

    return ours, twin, (model, optimizer)


@style
def curriculum() -> Pair:
    """Items become harder from epoch to epoch: a hook changes the dataset."""

    class Noisy(Dataset):
        def __init__(self):
            self.x, self.level = torch.randn(16, 3), 0

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return self.x[index] + 0.2 * self.level * torch.randn(3), int(self.x[index].sum() > 0)

    model, dataset = mlp(), Noisy()
    data, optimizer = DataLoader(dataset, 8, shuffle=True), adamw(model)

    def ours():
        def harder(record):
            dataset.level = record.epoch.number

        hotloop.Loop(model, optimizer, CRITERION).fit(data, epochs=3, on_epoch=harder)

    def twin():
        for epoch in range(3):
            dataset.level = epoch
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))

    return ours, twin, model


@style
def longer_sequences_later() -> Pair:
    """Another loader for each phase, and the same loop."""
    model, short, long = mlp(), pairs(), pairs(20, 10)
    optimizer = adamw(model)

    def ours():
        loop = hotloop.Loop(model, optimizer, CRITERION)
        loop.fit(short, epochs=2)
        loop.fit(long)

    def twin():
        for x, y in [*short, *short, *long]:
            update(optimizer, CRITERION(model(x), y))

    return ours, twin, (model, optimizer)


@style
def evaluation_every_few_steps() -> Pair:
    """A hook that looks at held-out data in the middle of an epoch; dropout draws what it would have drawn."""
    model, data, held_out = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), loader(), pairs(10)
    optimizer = adamw(model)
    found: list[float] = []

    def ours():
        def look(record):
            if record.step % 2 == 0:
                found.append(record.loop.evaluate(held_out)["loss"])

        hotloop.Loop(model, optimizer, CRITERION).fit(data, epochs=2, on_step=look)

    def twin():
        step = 0
        for _ in range(2):
            for x, y in data:
                update(optimizer, CRITERION(model(x), y))
                step += 1
                if step % 2 == 0:
                    model.eval()
                    with torch.no_grad():
                        found.append(sum(CRITERION(model(x), y).item() for x, y in held_out) / len(held_out))
                    model.train()

    return ours, twin, (model, found)


@style
def stopped_by_a_hook() -> Pair:
    """The run ends when the loss is low enough."""
    model, data = mlp(), loader()
    optimizer = adamw(model, lr=0.1)

    def ours():
        report = hotloop.Loop(model, optimizer, CRITERION).fit(
            data, epochs=20, on_epoch=lambda record: "stop" if record.epoch.loss < 0.3 else None
        )
        assert len(report.epochs) < 20

    def twin():
        for _ in range(20):
            losses = []
            for x, y in data:
                loss = CRITERION(model(x), y)
                update(optimizer, loss)
                losses.append(loss.item())
            if sum(losses) / len(losses) < 0.3:
                break

    return ours, twin, model


@style
def weights_clamped_after_each_step() -> Pair:
    """A constraint on the weights, as of the first Wasserstein GAN."""
    model, data = mlp(), loader()
    optimizer = sgd(model)

    @torch.no_grad()
    def clamp(model):
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)

    def ours():
        hotloop.Loop(model, optimizer, CRITERION).fit(data, on_step=lambda record: clamp(record.model))

    def twin():
        for x, y in data:
            update(optimizer, CRITERION(model(x), y))
            clamp(model)

    return ours, twin, model


@style
def object_with_a_state() -> Pair:
    """Running statistics of the loss, kept in an object that checkpoints hold."""

    class Normalizer:
        def __init__(self):
            self.mean = torch.tensor(1.0)

        def __call__(self, loss):
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            return loss / self.mean

        def state_dict(self):
            return {"mean": self.mean}

        def load_state_dict(self, state):
            self.mean = state["mean"]

    model, data, normalise = mlp(), loader(), Normalizer()
    optimizer = sgd(model)

    def ours():
        objective = lambda model, batch: normalise(CRITERION(model(batch[0]), batch[1]))  # noqa: E731
        hotloop.Loop(model, optimizer, objective=objective, stateful={"normalise": normalise}).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for x, y in data:
                update(optimizer, normalise(CRITERION(model(x), y)))

    return ours, twin, (model, normalise)


# Loops of one's own


@style
def own_loop() -> Pair:
    """`loop.batches` and `loop.step`, and whatever one likes around them."""
    model, data, held_out = mlp(), loader(), pairs(10)
    optimizer = sgd(model)
    losses: list[float] = []

    def ours():
        loop = hotloop.Loop(model, optimizer, CRITERION)
        for _ in range(2):
            for batch in loop.batches(data):
                losses.append(loop.step(batch).item())
            losses.append(loop.evaluate(held_out)["loss"])

    def twin():
        for _ in range(2):
            for x, y in data:
                loss = CRITERION(model(x), y)
                update(optimizer, loss)
                losses.append(loss.item())
            with torch.no_grad():
                losses.append(sum(float(CRITERION(model(x), y)) for x, y in held_out) / 2)

    return ours, twin, (model, losses)


@style
def steps_without_a_loader() -> Pair:
    """Batches that arise in the loop, as from an environment or a buffer of replays."""
    model = mlp(outputs=1)
    optimizer = adamw(model)

    def draw():
        x = torch.randn(4, 3)
        return x, x.sum(1, keepdim=True)

    def ours():
        loop = hotloop.Loop(model, optimizer, nn.MSELoss())
        for _ in range(6):
            loop.step(draw())

    def twin():
        for _ in range(6):
            x, y = draw()
            update(optimizer, F.mse_loss(model(x), y))

    return ours, twin, (model, optimizer)


@style
def steps_in_place_of_epochs() -> Pair:
    """A stream without an end, and a number of steps."""

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                x = torch.randn(3)
                yield x, (x.sum() > 0).long()

    model, data = mlp(), DataLoader(Endless(), 4)
    optimizer = sgd(model)

    def ours():
        loop = hotloop.Loop(model, optimizer, CRITERION)
        loop.fit(data, on_step=lambda record: "stop" if record.step == 7 else None)

    def twin():
        for x, y in islice(data, 7):
            update(optimizer, CRITERION(model(x), y))

    return ours, twin, (model, optimizer)


@style
def training_step_of_the_model() -> Pair:
    """The model has a method for it, as in Lightning."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch):
            x, y = batch
            return F.cross_entropy(self(x), y)

    model, data = Module(), loader()
    optimizer = adamw(model)

    def ours():
        hotloop.Loop(model, optimizer, objective=Module.training_step).fit(data)

    def twin():
        for batch in data:
            update(optimizer, model.training_step(batch))

    return ours, twin, model


@style
def active_learning() -> Pair:
    """Between two trainings the model chooses the items that it is least sure of."""
    model, pool = mlp(), torch.randn(30, 3)
    labels = (pool.sum(1) > 0).long()
    optimizer = sgd(model)
    chosen: list[Tensor] = []

    def unsure(logits):
        return logits.softmax(1).amax(1).argsort()[:10]

    def ours():
        loop = hotloop.Loop(model, optimizer, CRITERION)
        for _ in range(3):
            chosen.append(unsure(loop.predict([(part,) for part in pool.split(7)], predict=lambda m, b: m(b[0]))))
            loop.fit([(pool[chosen[-1]], labels[chosen[-1]])])

    def twin():
        for _ in range(3):
            with torch.no_grad():
                chosen.append(unsure(torch.cat([model(part) for part in pool.split(7)])))
            update(optimizer, CRITERION(model(pool[chosen[-1]]), labels[chosen[-1]]))

    return ours, twin, (model, chosen)
