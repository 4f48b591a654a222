"""The quiz: every question has one right answer that its judge accepts, and typical wrong ones that it does not."""

import pytest

from hotloop.apps.learn.lesson import lessons
from hotloop.apps.learn.quiz import LETTERS, Question, about, questions
from hotloop.errors import BadArgument

EACH = pytest.mark.parametrize("question", questions(), ids=lambda each: each.key)
RIGHT = {
    "portable": [
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        "device = hotloop.pick().device",
        'device = torch.device("cpu" if not torch.cuda.is_available() else "cuda:0")',
        'device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")',
        'device = "cuda" if torch.cuda.device_count() else "cpu"',
        'device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"',
        '`device = torch.device("cuda" if torch.cuda.is_available() else "cpu")`',
    ],
    "made-there": ["noise = torch.zeros((1000,), device='cuda')", "noise = torch.full((1000,), 0.0, device=device)"],
    "move-line": ["x = hotloop.move(x, device)", "x=x.to(device)", "x = x.to(device, non_blocking=True)"],
    "no-grad-line": ["with torch.no_grad():", "with torch.inference_mode(): pass"],
    "non-blocking": ["x = x.to(device,non_blocking=True)"],
    "detach": ["total = total + loss.detach()", "total += loss.item()", "total = loss.detach() + total"],
}
WRONG = {
    "portable": [
        'device = "cuda"',
        'device = "cuda" if torch.cuda.is_available else "cpu"',
        "import os",
        "device = __import__('os').getcwd()",
        "device = 9**9**9**9",
        "device = " + "(" * 400,
        "device = \0",
        'device = "cuda" if not torch.cuda.is_available() else "cpu"',
        "while True: pass",
        "((",
        "",
        'gpu = "cuda" if torch.cuda.is_available() else "cpu"',
    ],
    "made-there": ["noise = torch.zeros(1000).to(device)", "noise = torch.randn(1000, device=device)"],
    "move-line": ["x.to(device)", "x = x.cuda()", "y = x.to(device)", "model.to(device)"],
    "no-grad-line": ["model.eval()", "with torch.enable_grad():", "torch.no_grad()"],
    "non-blocking": ["x = x.to(device)", "x.to(device, non_blocking=True)"],
    "detach": ["total += loss", "loss.detach()"],
}


@EACH
def test_the_answer_of_a_question_is_right_and_explained(question: Question) -> None:
    assert question.is_right(question.answer)
    assert len(question.why) > 30
    assert question.lesson in {each.number for each in lessons()}
    if question.right:
        assert question.key in RIGHT
        assert question.key in WRONG
    else:
        assert len(question.choices) >= 3
        assert question.answer in LETTERS[: len(question.choices)]
        assert [letter for letter in LETTERS if question.is_right(letter)] == [question.answer]
        assert question.is_right(f" {question.answer.upper()}) ")
    assert not question.is_right("what?")


@pytest.mark.parametrize("key", RIGHT)
def test_other_right_lines_are_right_and_wrong_lines_are_not(key: str) -> None:
    question = next(each for each in questions() if each.key == key)
    assert [line for line in RIGHT[key] if not question.is_right(line)] == []
    assert [line for line in WRONG[key] if question.is_right(line)] == []


def test_there_are_twenty_questions_or_more_and_every_lesson_but_the_last_has_one() -> None:
    assert len({each.text for each in questions()}) == len(questions()) >= 20
    assert {each.lesson for each in questions()} >= set(range(1, 16))
    assert {each.lesson for each in about(9)} == {9}
    with pytest.raises(BadArgument, match="no question about lesson 77"):
        about(77)
