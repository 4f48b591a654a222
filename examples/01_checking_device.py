"""Which device do I have? And if it is only the CPU: why?"""

import torch

import hotloop


def plain() -> None:
    print("--- Plain PyTorch ---")
    print("torch.cuda.is_available() ->", torch.cuda.is_available())
    print("torch.cuda.device_count() ->", torch.cuda.device_count())
    # torch.accelerator knows every kind of GPU, not only NVIDIA's.
    print("torch.accelerator.is_available() ->", torch.accelerator.is_available())

    # The line that every tutorial starts with:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("The usual line picks:", device)

    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        print(f"Its name is {facts.name}, compute capability {facts.major}.{facts.minor}")
    else:
        print("A False is all you get: not why there is no GPU, and not what to do about it.")


def with_hotloop() -> None:
    print("\n--- With hotloop ---")
    choice = hotloop.pick()  # the best device there is, or the one named in HOTLOOP_DEVICE
    print("device:   ", choice.device)
    print("name:     ", choice.name or "unknown")
    print("precision:", choice.precision, "(the fastest that this device is good at)")
    print("reason:   ", choice.reason)

    # If something better was out of reach, each cause comes with its fix.
    for cause in choice.causes:
        print(f"- {cause.what}")
        print(f"  fix: {cause.fix}")

    # choice.device is a normal torch.device. Use it anywhere.
    print("A tensor there:", torch.ones(3, device=choice.device))


def wrong_requests() -> None:
    print("\n--- Asking for something that is not there ---")
    for wish in ("gpu", "cuda:42"):
        try:
            hotloop.pick(wish)
        except hotloop.HotloopError as error:
            print(f"hotloop.pick({wish!r}) -> {type(error).__name__}: {error}\n")


def main() -> None:
    plain()
    with_hotloop()
    wrong_requests()


if __name__ == "__main__":
    main()
