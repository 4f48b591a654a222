"""Steps of a training without an optimizer of `torch.optim`: gradients come, and the script writes to parameters."""

from collections.abc import Callable

from torch import Tensor

from hotloop.apps.simulate._torch import storage_id


class ByHand:
    """Notices when the parameters that got a gradient were updated by the script's own code."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped
        self._awaiting: set[int] = set()  # memory of parameters with a gradient that came since the last step
        self._written: set[int] = set()  # and of those that were updated
        self._differentiated = False
        self.listening = True

    @property
    def pending(self) -> bool:
        """Whether a write to a parameter would be an update."""
        return self.listening and (self._differentiated or bool(self._awaiting))

    def leave_to_optimizer(self) -> None:
        """One steps: what else writes to parameters, such as clipping or an average, is no step."""
        self.listening = False
        self._forget()

    def differentiates(self, parameter: Tensor | None) -> None:
        """An operation of the backward pass; with the parameter whose `.grad` it adds to."""
        if self._written:
            self._end()  # a new backward pass, so that whatever was not updated will not be
        self._differentiated = True
        if parameter is not None:
            self._awaiting.add(storage_id(parameter))

    def writes(self, tensor: Tensor, *, parameter: bool) -> None:
        """Something is written to the memory of a tensor; `parameter` where that is one's."""
        memory = storage_id(tensor)
        if memory in self._awaiting or (parameter and not self._awaiting):  # after `torch.autograd.grad` none awaits
            self._written.add(memory)
        if self._awaiting and self._written >= self._awaiting:
            self._end()

    def finish(self) -> None:
        """The script came to its end."""
        if self._written:
            self._end()

    def _end(self) -> None:
        self._forget()
        self._stepped()

    def _forget(self) -> None:
        self._awaiting.clear()
        self._written.clear()
        self._differentiated = False
