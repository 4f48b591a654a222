"""Runs the file without and with a GPU: the output must be on the CPU, then on the GPU."""

from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu", "gpu")
ASK = 'ask what is there: "cuda" if torch.cuda.is_available() else "cpu"'


def check(ran: Ran) -> Iterator[CheckVerdict]:
    assert ran.cpu is not None
    words = ran.source.replace(" ", "")
    hint = f"without a GPU it ends in an error: {ASK}"
    if "torch.cuda.is_available" in words and "torch.cuda.is_available()" not in words:
        hint = "torch.cuda.is_available without () is the function itself, which is always true: call it"
    yield CheckVerdict("without a GPU, the output is on the CPU", ran.cpu.error is None and on(ran.cpu) == "cpu", hint)
    hint = f"the GPU is there and not used: {ASK}"
    if "device_count()>1" in words:
        hint = "most machines with a GPU have one: device_count() > 1 is false there. Ask torch.cuda.is_available()"
    elif not ran.calls("is_available") and not ran.calls("pick"):
        hint = f'it runs everywhere now, but never on a GPU, because "cpu" is fixed: {ASK}'
    yield CheckVerdict("with a GPU, the output is on the GPU", ran.error is None and on(ran) == "cuda", hint)


def on(ran: Ran) -> str:
    return str(ran["output"].device.type)
