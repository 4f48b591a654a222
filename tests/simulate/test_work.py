"""FLOPs against torch's own counter on whole models, bytes by hand, and nothing for views."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from calibration_observe import observe
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.work import Tf32, WorkPart, parts_of, switches

sizes = st.integers(1, 9)


DEFAULT = Tf32()


def parts(call: Callable[[], object], tf32: Tf32 = DEFAULT) -> list[WorkPart]:
    return [part for operation in observe(call) for part in parts_of(operation, tf32)]


def flops(call: Callable[[], object]) -> float:
    return sum(part.flops for part in parts(call))


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def meta(*shape: int, **options: object) -> Tensor:
    return torch.empty(*shape, device="meta", **options)


def only(call: Callable[[], object]) -> WorkPart:
    [part] = parts(call)
    return part


def conv_net() -> Callable[[], object]:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 1, bias=False),
            nn.ConvTranspose2d(24, 8, 4, stride=2, padding=1),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 16 * 16, 10),
        )
        images, labels = torch.empty(5, 3, 32, 32, requires_grad=True), torch.zeros(5, dtype=torch.int64)
    return lambda: F.cross_entropy(model(images), labels).backward()


def transformer() -> Callable[[], object]:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
        tokens = torch.zeros(3, 12, dtype=torch.int64)
    return lambda: model(tokens).float().logsumexp(-1).mean().backward()


def lstm() -> Callable[[], object]:
    with torch.device("meta"):
        model = nn.LSTM(7, 11, num_layers=2, batch_first=True)
        tokens = torch.empty(3, 6, 7)
    return lambda: model(tokens)[0].sum().backward()


@pytest.mark.parametrize("model", [conv_net, transformer, lstm])
def test_whole_models_have_the_flops_that_torch_counts(model):
    call = model()
    call()  # the first time, gradients are made
    assert flops(call) == counted(call) > 0


@given(sizes, sizes, sizes, sizes)
def test_products(count, rows, inner, columns):
    a, b = meta(count, rows, inner), meta(count, inner, columns)
    for call in (
        lambda: torch.bmm(a, b),
        lambda: torch.baddbmm(meta(count, rows, columns), a, b),
        lambda: torch.mm(a[0], b[0]),
        lambda: torch.addmm(meta(columns), a[0], b[0]),
        lambda: a @ b[0],
    ):
        assert flops(call) == counted(call)
    assert flops(lambda: torch.mv(a[0], b[0, :, 0])) == 2 * rows * inner
    assert flops(lambda: torch.dot(a[0, 0], b[0, :, 0])) == 2 * inner


@given(
    batch=sizes,
    groups=st.integers(1, 3),
    into=st.integers(1, 3),
    out=st.integers(1, 3),
    side=st.integers(5, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    transposed=st.booleans(),
)
def test_each_gradient_of_a_convolution_is_as_much_work_as_the_convolution(
    batch, groups, into, out, side, kernel, stride, transposed
):
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = make(into * groups, out * groups, kernel, stride=stride, groups=groups, bias=False, device="meta")
    images = meta(batch, into * groups, side, side, requires_grad=True)
    forward = flops(lambda: layer(images))
    assert forward == counted(lambda: layer(images))
    result = layer(images)
    backward = parts(lambda: result.backward(meta(*result.shape)))
    assert [part.flops for part in backward if part.flops] == [forward, forward]


def test_a_gradient_that_is_not_asked_for_is_no_work():
    layer = nn.Conv2d(3, 8, 3, device="meta")
    result = layer(meta(2, 3, 8, 8))
    families = [part.family for part in parts(lambda: result.backward(meta(*result.shape)))]
    assert families == ["conv-backward-weight", "reduction"]  # weight and bias


def test_depthwise_convolutions_are_a_family_of_their_own():
    layer = nn.Conv2d(8, 8, 3, groups=8, bias=False, device="meta")
    assert only(lambda: layer(meta(1, 8, 9, 9))).family == "depthwise"


def attention(backward: bool, causal: bool, queries: int = 64, keys: int = 64, kind: str = "flash") -> float:
    q, k = Shape((2, 4, queries, 16), "bfloat16", 2), Shape((2, 4, keys, 16), "bfloat16", 2)
    name = f"aten._scaled_dot_product_{kind}_attention{'_backward' if backward else ''}.default"
    inputs = (q, q, k, k) if backward else (q, k, k)
    [part] = parts_of(Operation(name, inputs, (q,), {"is_causal": causal}))
    return part.flops


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_is_two_products_forward_and_five_backward(kind):
    product = 2 * 2 * 4 * 64 * 64 * 16
    assert attention(False, False, kind=kind) == 2 * product
    assert attention(True, False, kind=kind) == 5 * product


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_causal_mask_leaves_the_pairs_below_the_diagonal(queries, keys):
    seen = torch.ones(queries, keys).tril().sum().item() / (queries * keys)
    assert attention(False, True, queries, keys) == pytest.approx(attention(False, False, queries, keys) * seen)


def test_a_recurrent_net_of_cudnn_is_as_much_work_as_the_same_step_by_step():
    model = nn.LSTM(7, 11, num_layers=2, batch_first=True, device="meta")
    tokens = meta(3, 6, 7)
    shape = {name: Shape(tuple(p.shape), "float32", 4) for name, p in model.named_parameters()}
    state = Shape((2, 3, 11), "float32", 4)
    arguments = {"num_layers": 2, "batch_first": True, "bidirectional": False, "batch_sizes": []}
    inputs = (Shape((3, 6, 7), "float32", 4), *shape.values(), state, state)
    [part] = parts_of(Operation("aten._cudnn_rnn.default", inputs, (Shape((3, 6, 11), "float32", 4),), arguments))
    assert part.flops == counted(lambda: model(tokens))
    assert part.kernels >= 6 * 2  # each token waits for the one before, in each layer
    assert part.precision == "tf32"


def test_views_and_memory_alone_are_no_work():
    x = meta(4, 6)
    for call in (
        lambda: x.view(24),
        x.t,
        lambda: x.split(2),
        lambda: x[1:],
        lambda: x.unsqueeze(0).expand(3, 4, 6),
        x.detach,
        lambda: torch.empty_like(x),
    ):
        assert parts(call) == []


def test_bytes_are_those_that_are_touched():
    x, y = meta(1000, 50), meta(1000, 50)
    assert only(lambda: x + y).bytes == 3 * 200_000
    assert only(lambda: x.add_(y)).bytes == 3 * 200_000
    assert only(x.zero_).bytes == 200_000
    assert only(lambda: x.copy_(y)).bytes == 2 * 200_000
    assert only(lambda: x.to(torch.bfloat16)).bytes == 200_000 + 100_000
    assert only(x.sum).bytes == 200_004
    embedded = only(lambda: F.embedding(meta(20, dtype=torch.int64), x))
    assert embedded.bytes == 20 * 8 + 2 * 20 * 50 * 4  # not the whole table
    assert embedded.family == "gather"


def test_lists_count_each_tensor_and_launch_by_chunks():
    params = [meta(100, 100) for _ in range(100)]
    others = [meta(100, 100) for _ in range(100)]
    part = only(lambda: torch._foreach_add_(params, others))
    assert part.family == "optimizer-foreach"
    assert part.bytes == 3 * 100 * 40_000
    assert part.kernels == 2
    assert only(lambda: torch._foreach_mul(params, 2.0)).bytes == 2 * 100 * 40_000


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_fused_step_reads_and_writes_all_but_the_gradients(amsgrad):
    shape, step = Shape((1000,), "float32", 4), Shape((), "float32", 4)
    lists = 5 if amsgrad else 4
    operation = Operation("aten._fused_adam_.default", (shape,) * 3 * lists + (step,) * 3, (), {"amsgrad": amsgrad})
    [part] = parts_of(operation)
    assert part.family == "optimizer-fused"
    assert part.bytes == pytest.approx(3 * 4000 * (2 * lists - 1), rel=0.01)


def test_the_precision_is_that_of_the_tensors_and_the_switches():
    a = meta(8, 8)
    assert only(lambda: a @ a).precision == "fp32"
    assert [p.precision for p in parts(lambda: a @ a, Tf32(products=True))] == ["tf32"]
    half = meta(8, 8, dtype=torch.half)
    assert only(lambda: half @ half).precision == "fp16"
    layer = nn.Conv2d(3, 4, 3, bias=False, device="meta")
    assert only(lambda: layer(meta(1, 3, 8, 8))).precision == "tf32"  # as PyTorch has it, unlike products
    assert [p.precision for p in parts(lambda: layer(meta(1, 3, 8, 8)), Tf32(cudnn=False))] == ["fp32"]


def test_the_switches_are_pytorchs():
    assert switches() == Tf32(products=False, cudnn=True)


def test_the_layout_of_images_is_known():
    layer = nn.Conv2d(8, 4, 3, bias=False, device="meta").to(memory_format=torch.channels_last)
    images = meta(2, 8, 8, 8)
    main, copy = parts(lambda: layer(images.contiguous()))
    assert main.layout == "channels_last"  # the weight alone decides
    assert (copy.family, copy.bytes) == ("copy", 2 * 4 * images.numel())  # and the images are put in its order
    plain = nn.Conv2d(8, 4, 3, bias=False, device="meta")
    assert only(lambda: plain(images)).layout == "contiguous"


def test_copies_to_and_from_the_host_are_not_kernels():
    here, there = Shape((10, 10), "float32", 4, "cpu"), Shape((10, 10), "float32", 4)
    assert parts_of(Operation("aten._to_copy.default", (here,), (there,))) == ()
    assert parts_of(Operation("aten._to_copy.default", (there,), (Shape((10, 10), "float32", 4, "cpu"),))) == ()


@given(st.text(min_size=1, max_size=20), st.lists(st.tuples(sizes, sizes), max_size=4))
def test_whatever_the_operation_it_has_some_work(name, shapes):
    tensors = tuple(Shape(shape, "float32", 4) for shape in shapes)
    known = (
        "aten.mm.default",
        "aten.convolution_backward.default",
        "aten._cudnn_rnn.default",
        "aten.embedding.default",
    )
    for each in (name, f"aten.{name}.default", *known):
        for part in parts_of(Operation(each, tensors, tensors[:1])):
            assert part.bytes >= 0
            assert part.kernels >= 0


def test_a_bias_is_added_by_a_kernel_of_its_own():
    layer = nn.Conv2d(8, 4, 3, padding=1, device="meta")
    convolved, added = parts(lambda: layer(meta(2, 8, 8, 8)))
    assert (convolved.family, added.family) == ("conv", "pointwise")
    assert added.bytes == 2 * 4 * (2 * 4 * 8 * 8)


def test_a_transposed_convolution_goes_as_the_gradient_that_it_is():
    layer = nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1, bias=False, device="meta")
    image = meta(2, 8, 6, 6)
    forward = only(lambda: layer(image))
    assert forward.family == "conv-backward-input"
    mirror = nn.Conv2d(16, 8, 4, stride=2, padding=1, bias=False, device="meta")
    wide = meta(2, 16, 12, 12).requires_grad_()
    [gradient] = [part for part in parts(lambda: mirror(wide).sum().backward()) if part.family == "conv-backward-input"]
    assert (forward.traits, forward.product, forward.flops) == (gradient.traits, gradient.product, gradient.flops)
