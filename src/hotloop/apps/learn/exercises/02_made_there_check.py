"""Runs the file on a GPU and looks at what is copied in its loop."""

from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    picture = ran["picture"]
    hint = "`picture` ends on the CPU: make it with device=device"
    if ran.discarded("to"):
        hint = f"`{ran.discarded('to')[0]}` alone changes nothing, since .to returns a copy: make it with device=device"
    yield CheckVerdict("the picture ends on the GPU", picture.device.type == "cuda" and not ran.mismatches(), hint)

    sent = [copy for copy in ran.copies() if copy.direction == "to the device"]
    line = sent[0].line if sent else 0
    yield CheckVerdict(
        "nothing is copied to the GPU in the loop",
        not sent,
        f"line {line} makes a tensor on the CPU and copies it in every step: torch.randn(…, device=device)",
    )
    back = [copy for copy in ran.copies() if copy.direction == "to the host"]
    line = back[0].line if back else 0
    yield CheckVerdict(
        "nothing comes back to the CPU in the loop",
        not back,
        f"line {line} brings the picture back to the CPU in every step: leave it on the device",
    )
    spread = float(picture.detach().float().cpu().std())
    yield CheckVerdict(
        "the picture has its noise",
        0.25 < spread < 0.4,
        f"the spread should be about 0.32, and is {spread:.2f}: add the noise in each of ten steps",
    )
