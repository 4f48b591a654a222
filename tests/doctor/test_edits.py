"""Changes of sources: what is asked for, and not a character more."""

import ast
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.doctor.edits import Edit, SourceText, applied, diff_of

LOOP = """\
    import torch

    for epoch in range(2):  # é
    \tfor x, y in loader:
    \t\ttotal += net(x)

    \t\ttext = '''
      kept as it is
    '''
    \tprint(total)
"""


def changed(text: str, edits: list[Edit]) -> str:
    after = applied(text, edits)
    ast.parse(after)
    return after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(data)", "DataLoader(data, workers=2)"),
        ("DataLoader()", "DataLoader(workers=2)"),
        ("DataLoader(data, )", "DataLoader(data, workers=2, )"),
        (
            "DataLoader(data,\n    8,  # ä comment, with a )\n)",
            "DataLoader(data,\n    8, workers=2,  # ä comment, with a )\n)",
        ),
        ("DataLoader(data, workers=args.n, shuffle=True)", "DataLoader(data, workers=2, shuffle=True)"),
        ("DataLoader(*rest, **more)", "DataLoader(*rest, **more, workers=2)"),
        ("é = 'é'; DataLoader('é', b=(1))", "é = 'é'; DataLoader('é', b=(1), workers=2)"),
        ("DataLoader((data))", "DataLoader((data), workers=2)"),
    ],
)
def test_a_call_gets_an_argument(before: str, after: str) -> None:
    source = SourceText(before)
    (call,) = source.calls(1, "DataLoader")
    edits = source.with_arguments(call, workers="2")
    assert changed(before, edits) == after


@given(st.lists(st.sampled_from(["a", "b=1", "c='é, ('", "*d", "e=f(g, h)", "**i"]), max_size=5, unique=True))
def test_an_argument_comes_to_any_call(arguments: list[str]) -> None:
    text = f"x = call({', '.join(arguments)})"
    try:
        source = SourceText(text)
    except SyntaxError:  # positional after named
        return
    (call,) = source.calls(1, "call")
    with_one = changed(text, source.with_arguments(call, new="2"))
    (now,) = SourceText(with_one).calls(1, "call")
    assert [each.arg for each in now.keywords].count("new") == 1


def test_a_block_is_put_under_a_header_with_the_indentation_of_the_file() -> None:
    source = SourceText(dedent(LOOP).replace("text = '''\n  kept as it is\n'''", "text = 1"))
    (loop, _), *_ = source.around(4)
    assert isinstance(loop, ast.For)
    after = changed(source.text, source.inside("with torch.no_grad():", [loop]))
    assert "\twith torch.no_grad():\n\t\tfor x, y in loader:\n\t\t\ttotal += net(x)\n\n\t\t\ttext = 1\n\tprint" in after


def test_a_string_over_several_lines_is_not_indented() -> None:
    source = SourceText(dedent(LOOP))
    (loop, _), *_ = source.around(4)
    assert source.inside("with torch.no_grad():", [loop]) == []


def test_line_ends_stay_as_they_are() -> None:
    text = "import torch\r\nx = '\x0c'  # a form feed ends no line\r\nfor i in y:\r\n    z(i)\r\n"
    source = SourceText(text)
    (call, block), *_ = source.around(4)
    edits = [*source.after_imports("import hotloop"), *source.before(source.loops(4)[-1], "a()")]
    edits += source.without(call, block)
    expected = (
        "import torch\r\nimport hotloop\r\nx = '\x0c'  # a form feed ends no line\r\na()\r\nfor i in y:\r\n    pass\r\n"
    )
    assert changed(text, edits) == expected


def test_a_statement_goes_with_its_line_unless_it_shares_it() -> None:
    text = "for i in y:\n    a()  # why\n    b(); c()\n"
    source = SourceText(text)
    (first, block), *_ = source.around(2)
    assert changed(text, source.without(first, block)) == "for i in y:\n    b(); c()\n"
    second = block[1]
    assert changed(text, source.without(second, block)) == "for i in y:\n    a()  # why\n    pass; c()\n"


def test_an_expression_is_detached_as_a_whole() -> None:
    for text, after in (("t += loss", "t += loss.detach()"), ("t += a * b", "t += (a * b).detach()")):
        source = SourceText(text)
        statement = source.tree.body[0]
        assert isinstance(statement, ast.AugAssign)
        assert changed(text, source.detached(statement.value)) == after


def test_edits_of_the_same_characters_do_not_go_together() -> None:
    one, other, beside = Edit(0, 4, "x"), Edit(3, 5, "y"), Edit(4, 4, "z")
    assert applied("abcdef", [one, beside]) == "xzef"
    with pytest.raises(ValueError, match="same characters"):
        applied("abcdef", [one, other])


def test_a_patch_is_what_patch_reads() -> None:
    diff = diff_of({"a b.py": ("x\r\ny\r\n", "x\r\nz\r\n"), "same.py": ("x", "x")})
    assert diff == "--- a/a b.py\n+++ b/a b.py\n@@ -1,2 +1,2 @@\n x\r\n-y\r\n+z\r\n"
