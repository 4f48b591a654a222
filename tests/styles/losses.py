"""What is trained: criteria, and objectives of one's own."""

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import hotloop

from .style import Pair, adamw, close_style, loader, mlp, numbers, pairs, sgd, style, update


@style
def regression() -> Pair:
    model, batches = mlp(outputs=1), numbers()
    optimizer, criterion = sgd(model), nn.MSELoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches, epochs=2)

    def twin():
        for _ in range(2):
            for x, y in batches:
                update(optimizer, criterion(model(x), y))

    return ours, twin, (model, optimizer)


@style
def several_labels_for_an_item() -> Pair:
    """Binary cross entropy, in which the rare labels weigh more."""
    model, batches = mlp(outputs=4), [(x, (torch.rand(len(x), 4) < 0.3).float()) for x, _ in pairs()]
    optimizer, criterion = adamw(model), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def class_weights() -> Pair:
    model, batches = mlp(), pairs()
    optimizer, criterion = adamw(model), nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.7]))

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def label_smoothing() -> Pair:
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def ours():
        hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1)).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, F.cross_entropy(model(x), y, label_smoothing=0.1))

    return ours, twin, model


@close_style
def ignored_tokens_that_accumulate() -> Pair:
    """Two batches with different numbers of labelled tokens are as one."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    tokens = torch.randint(9, (4, 3, 5))
    labels = tokens.roll(-1, 2).masked_fill(torch.rand(4, 3, 5) < 0.4, -100)
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss(ignore_index=-100)

    def ours():
        flat = [(x.flatten(), y.flatten()) for x, y in zip(tokens, labels, strict=True)]
        hotloop.Loop(model, optimizer, criterion, accumulate=2).fit(flat)

    def twin():
        for x, y in zip(tokens.split(2), labels.split(2), strict=True):
            update(optimizer, criterion(model(x).flatten(0, 2), y.flatten()))

    return ours, twin, model


@style
def segmentation() -> Pair:
    """A class for each pixel, some of them without a label, with a Dice loss besides."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    pictures = torch.randn(12, 1, 6, 6)
    masks = (pictures[:, 0] > 0).long()
    masks[:, 0] = 255
    batches = list(zip(pictures.split(4), masks.split(4), strict=True))
    optimizer = adamw(model)

    def criterion(output, mask):
        known = mask != 255
        share, true = output.softmax(1)[:, 1] * known, (mask == 1).float()
        dice = 1 - (2 * (share * true).sum() + 1) / (share.sum() + true.sum() + 1)
        return F.cross_entropy(output, mask, ignore_index=255) + dice

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, mask in batches:
            update(optimizer, criterion(model(x), mask))

    return ours, twin, model


@style
def masked_loss() -> Pair:
    """The mean over what the mask lets through, and how many that are."""
    model = mlp(outputs=3)
    batches = [{"x": x, "mask": torch.rand(5, 3) < 0.6} for x, _ in pairs()]
    optimizer = adamw(model)

    def objective(model, batch):
        wrong = (model(batch["x"]) - batch["x"]).square() * batch["mask"]
        count = batch["mask"].sum()
        return wrong.sum() / count, count

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, objective(model, batch)[0])

    return ours, twin, model


@style
def siamese_pairs() -> Pair:
    """Two inputs through one network: near each other where they belong together."""
    model = mlp(outputs=4)
    batches = [(torch.randn(5, 3), torch.randn(5, 3), torch.randint(2, (5,)).float()) for _ in range(4)]
    optimizer = sgd(model)

    def contrastive(model, batch):
        a, b, same = batch
        distance = F.pairwise_distance(model(a), model(b))
        return (same * distance.square() + (1 - same) * (1 - distance).clamp_min(0).square()).mean()

    def ours():
        hotloop.Loop(model, optimizer, objective=contrastive).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, contrastive(model, batch))

    return ours, twin, model


@style
def triplets() -> Pair:
    """Metric learning: an anchor, one of its kind and one of another."""
    model, criterion = mlp(outputs=4), nn.TripletMarginLoss(margin=0.5)
    batches = list(torch.randn(4, 3, 5, 3))
    optimizer = adamw(model)

    def ours():
        objective = lambda model, batch: criterion(*(model(x) for x in batch))  # noqa: E731
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for anchor, positive, negative in batches:
            update(optimizer, criterion(model(anchor), model(positive), model(negative)))

    return ours, twin, model


@style
def autoencoder() -> Pair:
    """Batches are tensors: there is no target."""
    model, batches = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)), list(torch.randn(4, 5, 6))
    optimizer = adamw(model)

    def ours():
        hotloop.Loop(model, optimizer, objective=lambda model, x: F.mse_loss(model(x), x)).fit(batches, epochs=2)

    def twin():
        for _ in range(2):
            for x in batches:
                update(optimizer, F.mse_loss(model(x), x))

    return ours, twin, model


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(drawn), mean, log_variance


@style
def variational_autoencoder() -> Pair:
    """Two named losses, of which each is reported."""
    model, batches = VAE(), list(torch.randn(4, 5, 6))
    optimizer = adamw(model)

    def losses(model, x):
        output, mean, log_variance = model(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return {"reconstruction": F.mse_loss(output, x), "kl": 0.1 * kl}

    def ours():
        report = hotloop.Loop(model, optimizer, objective=losses).fit(batches)
        assert set(report.epochs[0].losses) == {"reconstruction", "kl"}

    def twin():
        for x in batches:
            update(optimizer, sum(losses(model, x).values()))

    return ours, twin, model


@style
def denoising_diffusion() -> Pair:
    """Noise and times are drawn for each batch."""
    model, batches = mlp(inputs=4, outputs=3), list(torch.randn(4, 5, 3))
    optimizer = adamw(model)

    def objective(model, x):
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(model(torch.cat([(1 - time) * x + time * noise, time], 1)), noise)

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for x in batches:
            update(optimizer, objective(model, x))

    return ours, twin, model


@style
def distillation() -> Pair:
    """A student learns from a teacher that is not trained."""
    teacher, model, batches = mlp().eval().requires_grad_(False), nn.Linear(3, 2), pairs()
    optimizer = sgd(model)

    def soft(model, x):
        return F.kl_div(F.log_softmax(model(x) / 2, 1), F.softmax(teacher(x) / 2, 1), reduction="batchmean")

    def ours():
        objective = lambda model, batch: {  # noqa: E731
            "labels": F.cross_entropy(model(batch[0]), batch[1]),
            "teacher": 4 * soft(model, batch[0]),
        }
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, F.cross_entropy(model(x), y) + 4 * soft(model, x))

    return ours, twin, (model, teacher)


@style
def info_nce() -> Pair:
    """Two views of an item find each other among those of the batch."""
    model, batches = mlp(outputs=4), list(torch.randn(4, 6, 3))
    optimizer = adamw(model)

    def objective(model, x):
        views = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        first, second = (F.normalize(model(view), dim=1) for view in views)
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(x)))

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for x in batches:
            update(optimizer, objective(model, x))

    return ours, twin, model


@style
def ctc() -> Pair:
    """Speech: the labels are shorter than the frames, and both have lengths."""
    model, criterion = nn.GRU(3, 5), nn.CTCLoss()
    batches = [
        (torch.randn(9, 2, 3), torch.randint(1, 5, (2, 3)), torch.tensor([9, 7]), torch.tensor([3, 2]))
        for _ in range(3)
    ]
    optimizer = adamw(model)

    def objective(model, batch):
        frames, labels, lengths, label_lengths = batch
        return criterion(model(frames)[0].log_softmax(2), labels, lengths, label_lengths)

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for frames, labels, lengths, label_lengths in batches:
            update(optimizer, criterion(model(frames)[0].log_softmax(2), labels, lengths, label_lengths))

    return ours, twin, model


@style
def physics_informed() -> Pair:
    """The loss holds the derivative of the network by its input: u' = -u, u(0) = 1."""
    model, batches = mlp(inputs=1, outputs=1), list(torch.rand(4, 6, 1))
    optimizer = adamw(model)

    def residual(model, t):
        t = t.requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

    def ours():
        hotloop.Loop(model, optimizer, objective=residual).fit(batches, epochs=2)

    def twin():
        for _ in range(2):
            for t in batches:
                update(optimizer, residual(model, t))

    return ours, twin, model


@style
def adversarial_training() -> Pair:
    """The objective asks for the gradient of its input first, and trains where the loss is larger."""
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def objective(model, batch):
        x, y = batch
        near = x.clone().requires_grad_()
        (uphill,) = torch.autograd.grad(F.cross_entropy(model(near), y), near)
        return F.cross_entropy(model(x + 0.1 * uphill.sign()), y)

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, objective(model, batch))

    return ours, twin, model


@style
def reinforce() -> Pair:
    """Policy gradients: actions are drawn, and those with a reward above the mean become more likely."""
    policy, batches = mlp(outputs=3), list(torch.randn(4, 8, 3))
    optimizer = adamw(policy)

    def objective(policy, states):
        actions = torch.distributions.Categorical(logits=policy(states))
        drawn = actions.sample()
        reward = states.gather(1, drawn[:, None])[:, 0]
        return -(actions.log_prob(drawn) * (reward - reward.mean())).mean() - 0.01 * actions.entropy().mean()

    def ours():
        hotloop.Loop(policy, optimizer, objective=objective).fit(batches, epochs=2)

    def twin():
        for _ in range(2):
            for states in batches:
                update(optimizer, objective(policy, states))

    return ours, twin, policy


@style
def target_network() -> Pair:
    """Q-learning: a copy of the network gives the targets, and follows every second step."""
    model, memory = mlp(outputs=2), [(s, a, s + 0.1, s.sum(1)) for s, a in pairs()]
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)

    def objective(model, batch):
        state, action, after, reward = batch
        value = model(state).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(value, reward + 0.9 * target(after).amax(1))

    def follow(record):
        if record.step % 2 == 0:
            target.load_state_dict(record.model.state_dict())

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(memory, epochs=2, on_step=follow)

    def twin():
        for step, batch in enumerate(memory * 2, 1):
            update(optimizer, objective(model, batch))
            if step % 2 == 0:
                target.load_state_dict(model.state_dict())

    return ours, twin, (model, target)


@style
def uncertainty_weights() -> Pair:
    """Two tasks whose weights are parameters: of the model, so that the optimizer has them."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kind, self.size = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
            self.log_variance = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            features = self.body(x).relu()
            return self.kind(features), self.size(features)[:, 0]

    model, batches = Model(), pairs()
    optimizer = adamw(model)

    def objective(model, batch):
        x, y = batch
        kind, size = model(x)
        losses = torch.stack([F.cross_entropy(kind, y), F.mse_loss(size, x.norm(dim=1))])
        return (losses * (-model.log_variance).exp() + model.log_variance).sum()

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, objective(model, batch))

    return ours, twin, model


@style
def criterion_with_parameters() -> Pair:
    """Center loss: the criterion is a module with weights, which the same optimizer trains."""

    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(2, 4))

        def forward(self, features, target):
            return (features - self.centers[target]).square().sum(1).mean()

    model, criterion, batches = mlp(outputs=4), Centers(), pairs()
    optimizer = sgd(model, criterion)

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batches)

    def twin():
        for x, y in batches:
            update(optimizer, criterion(model(x), y))

    return ours, twin, (model, criterion, optimizer)


@style
def perceptual_loss() -> Pair:
    """Features of a frozen network are compared, which a forward hook picks up."""
    critic, model, batches = mlp().requires_grad_(False), nn.Linear(3, 3), list(torch.randn(4, 5, 3))
    optimizer, seen = adamw(model), []
    critic[1].register_forward_hook(lambda module, inputs, output: seen.append(output))

    def objective(model, x):
        seen.clear()
        critic(model(x))
        critic(x)
        return F.mse_loss(*seen)

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for x in batches:
            update(optimizer, objective(model, x))

    return ours, twin, model


def networks() -> nn.ModuleDict:
    return nn.ModuleDict({"critic": mlp(inputs=2, outputs=1), "generator": mlp(inputs=2, outputs=2)})


def critic_loss(model, real):
    fake = model["generator"](torch.randn(len(real), 2)).detach()
    return F.softplus(-model["critic"](real)).mean() + F.softplus(model["critic"](fake)).mean()


def generator_loss(model, real):
    return F.softplus(-model["critic"](model["generator"](torch.randn(len(real), 2)))).mean()


def gan_of(every: int) -> Pair:
    model, batches = networks(), list(torch.randn(6, 5, 2))
    optimizers = {name: torch.optim.Adam(part.parameters(), 1e-2, betas=(0.5, 0.99)) for name, part in model.items()}
    objectives = {"critic": critic_loss, "generator": generator_loss}

    def ours():
        train_every = {"generator": every} if every > 1 else None
        hotloop.Loop(model, optimizers, objective=objectives, train_every=train_every).fit(batches)

    def twin():
        for step, real in enumerate(batches):
            update(optimizers["critic"], critic_loss(model, real))
            if step % every == 0:
                update(optimizers["generator"], generator_loss(model, real))

    return ours, twin, (model, *optimizers.values())


@style
def gan() -> Pair:
    """Two networks, two objectives, two optimizers."""
    return gan_of(every=1)


@style
def n_critic() -> Pair:
    """The critic is trained three times as often as the generator."""
    return gan_of(every=3)


@style
def gan_that_shares_its_fakes() -> Pair:
    """As in PyTorch's DCGAN tutorial: both objectives look at the same fakes, which the first has made."""
    model, batches, made = networks(), list(torch.randn(6, 5, 2)), []
    optimizers = {name: adamw(part) for name, part in model.items()}

    def critic(model, real):
        made[:] = [model["generator"](torch.randn(len(real), 2))]
        return F.softplus(-model["critic"](real)).mean() + F.softplus(model["critic"](made[0].detach())).mean()

    def generator(model, real):
        return F.softplus(-model["critic"](made[0])).mean()

    def ours():
        hotloop.Loop(model, optimizers, objective={"critic": critic, "generator": generator}).fit(batches)

    def twin():
        for real in batches:
            update(optimizers["critic"], critic(model, real))
            update(optimizers["generator"], generator(model, real))

    return ours, twin, (model, *optimizers.values())


@style
def gradient_penalty() -> Pair:
    """A Wasserstein critic whose slope is held at one: the loss is differentiated twice."""
    model, batches = mlp(inputs=2, outputs=1), [(torch.randn(5, 2), torch.randn(5, 2) + 1) for _ in range(4)]
    optimizer = adamw(model)

    def losses(model, batch):
        real, fake = batch
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        distance, penalty = model(real).mean() - model(fake).mean(), (slope.norm(dim=1) - 1).square().mean()
        return {"critic": -distance, "penalty": 10 * penalty}

    def ours():
        hotloop.Loop(model, optimizer, objective=losses).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, sum(losses(model, batch).values()))

    return ours, twin, model


@style
def masked_autoencoding() -> Pair:
    """A DataLoader's batches `(x, y)` of which the objective leaves the target alone and hides a part of the input."""
    model, data = mlp(outputs=3), loader()
    optimizer = adamw(model)

    def objective(model, batch):
        x, _ = batch
        hidden = torch.rand_like(x) < 0.5
        return F.mse_loss(model(x.masked_fill(hidden, 0))[hidden], x[hidden])

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for batch in data:
                update(optimizer, objective(model, batch))

    return ours, twin, model


@style
def weights_of_items() -> Pair:
    """Batches `(x, y, weight)`: each item counts by its weight."""
    model, batches = mlp(), [(x, y, torch.rand(len(x))) for x, y in pairs()]
    optimizer = adamw(model)

    def weighted(model, batch):
        x, y, weight = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()

    def ours():
        hotloop.Loop(model, optimizer, objective=weighted).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, weighted(model, batch))

    return ours, twin, model


@style
def meta_learning() -> Pair:
    """MAML: the loss after a step of gradient descent that is differentiated too."""
    model, tasks = mlp(outputs=1), [torch.randn(2, 5, 3) for _ in range(4)]
    optimizer = adamw(model)

    def objective(model, task):
        support, query = task
        weights = dict(model.named_parameters())
        loss = F.mse_loss(functional_call(model, weights, support), support.sum(1, keepdim=True))
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, adapted, query), query.sum(1, keepdim=True))

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(tasks)

    def twin():
        for task in tasks:
            update(optimizer, objective(model, task))

    return ours, twin, model


@style
def penalty_on_the_weights() -> Pair:
    """L1 besides the criterion."""
    model, batches = mlp(), pairs()
    optimizer = sgd(model)

    def ours():
        def objective(model, batch):
            x, y = batch
            return {
                "labels": F.cross_entropy(model(x), y),
                "l1": 0.01 * sum(p.abs().sum() for p in model.parameters()),
            }

        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for x, y in batches:
            penalty = 0.01 * sum(p.abs().sum() for p in model.parameters())
            update(optimizer, F.cross_entropy(model(x), y) + penalty)

    return ours, twin, model
