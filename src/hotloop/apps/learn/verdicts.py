"""What the check of an exercise says, for people: in a terminal, and in a notebook."""

from rich.console import Console
from rich.text import Text

from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.lesson import lessons
from hotloop.cli.output import say


def show_verdicts(where: Console, result: Result) -> None:
    """Each check: right, or not with a hint; then what comes next."""
    if result.device:
        say(where, f"Your file ran on {result.device}", style="dim")
    for verdict in result.verdicts:
        mark, style = ("right", "green") if verdict.right else ("not  ", "red")
        where.print(Text.assemble((f"{mark}  ", f"bold {style}"), verdict.what), soft_wrap=False)
        if not verdict.right and verdict.hint:
            say(where, f"hint: {verdict.hint}", indent="       ")
    where.print()
    if result.passed:
        following = str(result.lesson + 1) if result.lesson < lessons()[-1].number else "quiz"
        say(where, f"Exercise {result.lesson} is solved. Next: `hotloop learn {following}`", style="bold green")
        return
    say(where, f"{result.right} of {len(result.verdicts)} right. Edit the file, then check it again.", style="bold")
