"""Faster kernels for the same step."""

import ast
from collections.abc import Iterator

from hotloop.apps.doctor.edits import Edit, holds, name_of
from hotloop.apps.doctor.rules.base import Candidate, Script, imports, mentions
from hotloop.apps.doctor.seen import KEEPS_ZEROS, OPERATIONS, Location, SeenCall

MOST = 0.5  # of the floating-point operations of a step


def writes_zeros(script: Script) -> Iterator[Candidate]:
    for line in script.seen.lines:
        found = script.call_at(line.place, "zero_grad")
        if line.what != KEEPS_ZEROS or found is None:
            continue
        source, call = found
        given = [each.value for each in call.keywords if each.arg == "set_to_none"] or call.args[:1]
        edits = source.replaced(given[0], "True") if given else []
        what = "every gradient is filled with zeros, and the next backward pass adds to them"
        fix = "let them be freed, which is the default: set_to_none=True"
        yield Candidate(line.place, what, fix, edits)


def unfused_optimizer(script: Script) -> Iterator[Candidate]:
    for optimizer in script.seen.optimizers:
        source = script.source(optimizer.made)
        if optimizer.is_fused or optimizer.obstacle or optimizer.made is None or source is None:
            continue
        calls = list(source.calls(optimizer.made.line, optimizer.name))  # two of a GAN may stand on one line
        given = {each.arg for call in calls for each in call.keywords}
        if not calls or given & {"foreach", "fused", "capturable", "differentiable", None}:
            continue
        edits = [edit for call in calls for edit in source.with_arguments(call, fused="True")]
        what = f"{optimizer.name} reads and writes its weights several times in an update"
        yield Candidate(optimizer.made, what, "one kernel for all of it: fused=True", edits)


def convolutions_channels_first(script: Script) -> Iterator[Candidate]:
    for call in script.training:
        source = script.source(call.place)
        if not call.convolutions or call.is_channels_last or not call.name or source is None:
            continue
        code = f"{call.name}.to(memory_format=torch.channels_last)"
        loops = source.loops(call.place.line)
        edits = source.before(loops[-1], code) if loops and imports(source, "torch") else []
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


def attention_by_hand(script: Script) -> Iterator[Candidate]:
    ran = {line.place for line in script.seen.lines if line.what == OPERATIONS}
    for file, source in script.sources.items():
        for function in ast.walk(source.tree):
            if not isinstance(function, ast.FunctionDef) or mentions(function, "scaled_dot_product_attention"):
                continue
            matmuls = [node.lineno for node in ast.walk(function) if isinstance(node, ast.expr) and _is_matmul(node)]
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or name_of(call.func) != "softmax":
                    continue
                is_between = matmuls and min(matmuls) <= call.lineno <= max(matmuls) and len(matmuls) > 1
                place = Location(file, call.lineno)
                if is_between and place in ran:
                    what = "attention is computed step by step, with all of its scores in memory"
                    fix = "torch.nn.functional.scaled_dot_product_attention(q, k, v), which never stores them"
                    yield Candidate(place, what, fix)


def _is_matmul(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and name_of(node.func) in ("matmul", "bmm", "baddbmm", "einsum")


def data_parallel(script: Script) -> Iterator[Candidate]:
    for file, source in script.sources.items() if script.seen.on_gpu else ():
        for call in source.calls(None, "DataParallel"):
            what = "nn.DataParallel copies the model to every GPU in every step, from one process"
            fix = "a process for each GPU: `hotloop launch`, or torchrun and DistributedDataParallel"
            yield Candidate(Location(file, call.lineno), what, fix)


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
            if any(holds(block[end], each.line) for each in script.seen.backwards if each.file == call.place.file):
                wrapped = block[begin:end]
                return source.inside('with torch.autocast("cuda", torch.bfloat16):', wrapped) if wrapped else []
    return []
