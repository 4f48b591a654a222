"""The settings of PyTorch's CUDA allocator, from the environment: which are simulated, and which are not."""

import os
import re

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts, as PyTorch has it
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)")


class Settings:
    """What `PYTORCH_CUDA_ALLOC_CONF` asks for.

    >>> found = Settings("expandable_segments:True,max_split_size_mb:128")
    >>> found.expandable, found.ignored
    (True, ('max_split_size_mb:128',))
    """

    def __init__(self, words: str) -> None:
        given = {name: value.strip() for name, value in _SETTING.findall(words)}
        self.expandable = given.pop("expandable_segments", "False") == "True"
        if given.get("backend") == "native":
            del given["backend"]
        self.ignored = tuple(f"{name}:{value}" for name, value in given.items() if not name.startswith("pinned_"))

    @classmethod
    def of_environment(cls) -> "Settings":
        return cls(next((os.environ[name] for name in NAMES if os.environ.get(name)), ""))

    def come_late(self, words: str) -> None:
        """Others are asked for, and memory is in use."""
        self.ignored += (words,)

    def notes(self) -> list[str]:
        """What is left out of the simulation, in sentences."""
        if not self.ignored:
            return []
        return [f"these settings of the CUDA allocator are not simulated: {', '.join(self.ignored)}"]
