"""Asks for the shares of all processes, for two and for three."""

from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    share = ran["share"]

    def dealt(world: int, epoch: int) -> list[list[int]]:
        return [[int(item) for item in share(rank, world, epoch)] for rank in range(world)]

    epochs = [dealt(2, epoch) for epoch in range(3)]
    twice = [sorted(set(first) & set(second)) for first, second in epochs]
    hint = "both processes train on all items: DistributedSampler(range(ITEMS), num_replicas=world, rank=rank)"
    if any(twice) and any(len(first) < 12 for first, _ in epochs):
        hint = f"both train on items {twice[0][:4]}: all processes must shuffle by the same seed, then take their part"
    yield CheckVerdict("no item is trained on by two processes", not any(twice), hint)
    lost = [sorted(set(range(12)) - {item for part in parts for item in part}) for parts in epochs]
    yield CheckVerdict(
        "every item is trained on",
        not any(lost),
        f"items {lost[0][:4]} are trained on by nobody: the parts of all ranks together must be everything",
    )
    three = dealt(3, 0)
    yield CheckVerdict(
        "it works for three processes",
        sorted(item for part in three for item in part) == list(range(12)),
        f"for three processes the parts are {three}: use `world`, not a fixed 2",
    )
    same = epochs[0] == epochs[1] == epochs[2]
    hint = "the order is the same in every epoch: shuffle by a seed that all processes share, such as the epoch"
    if ran.calls("DistributedSampler") and not ran.calls("set_epoch"):
        hint = "without sampler.set_epoch(epoch) a DistributedSampler shuffles in the same way in every epoch"
    yield CheckVerdict("the order changes from epoch to epoch", not same, hint)
