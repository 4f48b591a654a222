"""Faster kernels for the same step."""

import ast
from collections.abc import Iterator

from hotloop.doctor.edits import Edit
from hotloop.doctor.rules.base import Candidate, Script, imports
from hotloop.doctor.seen import KEEPS_ZEROS, SeenCall

MOST = 0.5  # of the floating-point operations of a step


def writes_zeros(script: Script) -> Iterator[Candidate]:
    for line in script.seen.lines:
        found = script.call_at(line.place, "zero_grad")
        if line.what != KEEPS_ZEROS or found is None:
            continue
        source, call = found
        given = [each for each in call.keywords if each.arg == "set_to_none"] or call.args[:1]
        edits = source.without_argument(call, given[0]) if given else []
        what = "every gradient is filled with zeros, and the next backward pass adds to them"
        fix = "let them be freed, which is the default: zero_grad()"
        yield Candidate(line.place, what, fix, edits)


def unfused_optimizer(script: Script) -> Iterator[Candidate]:
    for optimizer in script.seen.optimizers:
        found = script.call_at(optimizer.made, optimizer.name)
        if optimizer.is_fused or optimizer.obstacle or found is None or optimizer.made is None:
            continue
        source, call = found
        if any(each.arg in ("foreach", "fused", "capturable", "differentiable", None) for each in call.keywords):
            continue
        edits = source.with_arguments(call, fused="True")
        what = f"{optimizer.name} reads and writes its weights several times in an update"
        yield Candidate(optimizer.made, what, "one kernel for all of it: fused=True", edits)


def convolutions_channels_first(script: Script) -> Iterator[Candidate]:
    for call in script.training:
        source = script.source(call.place)
        if not call.convolutions or call.is_channels_last or not call.name or source is None:
            continue
        code = f"{call.name}.to(memory_format=torch.channels_last)"
        edits = script.before_loops(call.place, code) if imports(source, "torch") else []
        what = f"{call.convolutions} convolutions read images channel by channel, and most kernels want pixel by pixel"
        fix = "keep weights and images in torch.channels_last; shapes and values stay the same"
        yield Candidate(call.place, what, fix, edits)


def fp32_matmuls(script: Script) -> Iterator[Candidate]:
    if _computes_in(script, "fp32") and script.seen.matmul_precision == "highest":
        code = 'torch.set_float32_matmul_precision("high")'
        what = "matmuls run in fp32, and the tensor cores are idle"
        fix = f"let them round their inputs to TF32: {code}"
        for call in script.training[:1]:
            yield Candidate(call.place, what, fix, elsewhere=script.at_start(code))


def fp32_step(script: Script) -> Iterator[Candidate]:
    for call in script.training if _computes_in(script, "fp32", "tf32") else ():
        if call.is_autocast:
            continue
        what = "the forward pass computes and stores its activations in fp32"
        fix = "compute it in bf16 where that is safe: torch.autocast"
        edits = _under_autocast(script, call)
        yield Candidate(call.place, what, fix, edits)


def searches_no_algorithms(script: Script) -> Iterator[Candidate]:
    calls = [call for call in script.training if call.convolutions]
    if script.seen.on_gpu and calls and not script.seen.searches_algorithms:
        code = "torch.backends.cudnn.benchmark = True"
        what = "cuDNN takes the algorithm that it guesses for each convolution"
        yield Candidate(
            calls[0].place, what, f"let it try several once per shape: {code}", elsewhere=script.at_start(code)
        )


def _computes_in(script: Script, *precisions: str) -> bool:
    """Whether most matmuls and convolutions of a GPU are in one of these precisions."""
    matmuls = script.seen.matmuls
    return script.seen.on_gpu and sum(matmuls.get(each, 0.0) for each in precisions) > MOST * sum(matmuls.values())


def _under_autocast(script: Script, call: SeenCall) -> list[Edit]:
    """The statements from the forward pass to the one before backward(), in one block, under autocast."""
    source = script.source(call.place)
    if source is None or not imports(source, "torch"):
        return []
    for statement, block in source.around(call.place.line)[:1]:
        begin = block.index(statement)
        for end in range(begin, len(block)):
            if any(_holds(block[end], each.line) for each in script.seen.backwards if each.file == call.place.file):
                wrapped = block[begin:end]
                return source.inside('with torch.autocast("cuda", torch.bfloat16):', wrapped) if wrapped else []
    return []


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or line)
