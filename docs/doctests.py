"""Shows the examples of docstrings as code: every block of `>>>` lines is fenced for the documentation."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """A docstring stays plain in the source, where doctest runs it; only the page needs the fence."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda block: f"```pycon\n{block[0]}\n```", obj.docstring.value)
