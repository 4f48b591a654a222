"""The table of GPUs is consistent with itself, and a name finds its card however it is spelt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import Card, card, cards, generic, near_names
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}  # per multiprocessor; 128 in all others


def test_there_are_many_and_none_twice() -> None:
    assert len(cards()) >= 30
    assert len({each.key for each in cards()}) == len(cards())
    assert len({(each.name, each.memory) for each in cards()}) == len(cards())


def test_what_a_card_cannot_do_is_absent() -> None:
    for each in cards():
        for dtype, since in (("bf16", (8, 0)), ("tf32", (8, 0)), ("fp8", (8, 9)), ("fp16", (6, 0)), ("fp32", (0, 0))):
            assert (dtype in each.peaks) == (each.capability >= since), (each.key, dtype)


def test_peaks_follow_from_the_chip() -> None:
    for each in cards():
        cores = CORES.get(each.capability, 128)
        assert each.peaks["fp32"] == pytest.approx(each.sms * cores * 2 * each.clock, rel=0.06)
        if "bf16" in each.peaks:
            assert each.peaks["bf16"] == each.peaks["fp16"]
            assert each.peaks["tf32"] == pytest.approx(each.peaks["bf16"] / 2, rel=0.02)
        if "fp8" in each.peaks:
            assert each.peaks["fp8"] == pytest.approx(2 * each.peaks["bf16"], rel=0.02)
        assert each.peaks["fp16"] >= 2 * each.peaks["fp32"] * 0.98


def test_orders_of_magnitude() -> None:
    for each in cards():
        assert 4 * 2**30 < each.memory < 300 * 2**30
        assert each.memory % 2**21 == 0
        assert 1.5e11 < each.bandwidth < 1e13
        assert 1e10 < each.pcie < each.bandwidth
        assert 1e9 < each.clock < 3e9
        assert Card.from_json(each.to_json()) == each


def test_every_name_finds_its_card() -> None:
    for each in cards():
        assert card(each.key) == each
        assert card(each.key.upper().replace("-", " ")) == each
        assert card(each.name).name == each.name


@pytest.mark.parametrize(
    ("spelt", "key"),
    [
        ("H200", "h200"),
        ("nvidia h200", "h200"),
        ("RTX 4090", "rtx4090"),
        ("geforce_rtx_4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("a100", "a100-80"),
        ("A100 40GB", "a100-40"),
        ("H100", "h100-sxm"),
        ("A6000", "rtxa6000"),
        ("RTX 3080 12 GB", "rtx3080-12"),
        ("Tesla T4", "t4"),
        ("v100-32GB", "v100-32"),
    ],
)
def test_spellings(spelt: str, key: str) -> None:
    assert card(spelt).key == key


def test_an_unknown_card_is_an_error_that_lists_near_names() -> None:
    with pytest.raises(BadArgument, match="rtx4080ti") as refused:
        card("rtx4080ti")
    assert refused.value.fix
    assert "did you mean" in refused.value.fix
    assert "rtx4080" in near_names("rtx4080ti")
    assert "--vram" in refused.value.fix


def test_where_no_name_is_near_the_memory_is_asked_for() -> None:
    with pytest.raises(BadArgument) as refused:
        card("zzz")
    assert (refused.value.fix or "").startswith("give its memory alone, as in --vram 24GiB")


@given(st.text(max_size=40))
def test_any_text_is_a_card_or_a_clean_error(name: str) -> None:
    try:
        found = card(name)
    except BadArgument as error:
        said = str(error)
    else:
        said = found.key
    assert printable(said.replace("\n", "")) == said.replace("\n", "")


def test_a_card_by_its_memory_alone() -> None:
    for given_as in ("24GiB", " 24 gib ", 24 * 2**30, str(24 * 2**30)):
        made = generic(given_as)
        assert made.memory == 24 * 2**30
        assert made.generic
        assert made.name == "a GPU with 24.0 GiB"
    assert generic("80GB").memory == 80 * 10**9


@pytest.mark.parametrize("memory", ["", "much", "-1GiB", "24", 0, -5, "1e9GiB"])
def test_what_is_no_memory_is_refused(memory: int | str) -> None:
    with pytest.raises(BadArgument) as refused:
        generic(memory)
    assert refused.value.fix


def test_a_good_guess_is_not_followed_by_the_whole_table() -> None:
    with pytest.raises(BadArgument) as caught:
        card("h300")
    assert "did you mean" in caught.value.fix
    assert caught.value.fix.count(",") < 6
    assert "gtx1080ti" not in caught.value.fix
