"""Support for torch's distributed autograd (over RPC), which keeps gradients in a context instead of in `.grad`.

Its engine does not run the hooks that ordinary backwards run. It only runs hooks on the nodes that would accumulate
into `.grad`. So a wrapper that is made while RPC is in use registers hooks there, too. When all gradients of such a
backward are ready, they replace `.grad` until they are reduced. The reduction does not overlap with the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd import graph

from syncline._torch.autograd import current_context_id, gradients_in_context, is_rpc_in_use


class AutogradContexts:
    """Hooks for the gradients that parameters get in contexts of distributed autograd.

    Args:
        parameters: the parameters to watch.
        gradient_is_ready: called with a parameter's index and the context's id.
    """

    def __init__(self, parameters: Sequence[Tensor], gradient_is_ready: Callable[[int, int], None]) -> None:
        self._parameters = parameters
        self._gradient_is_ready = gradient_is_ready
        self._ids: set[int] = set()
        # The nodes are held here, because the engine knows them by identity and a parameter holds its own weakly.
        self._nodes = [graph.get_gradient_edge(parameter).node for parameter in parameters]
        self.handles = [node.register_hook(self._make_hook(index)) for index, node in enumerate(self._nodes)]

    @staticmethod
    def of_this_process(
        parameters: Sequence[Tensor], gradient_is_ready: Callable[[int, int], None]
    ) -> AutogradContexts | None:
        """Return hooks on the parameters; None if this process does not use torch's RPC."""
        return AutogradContexts(parameters, gradient_is_ready) if is_rpc_in_use() else None

    def forward_begins(self) -> None:
        """Remember the context of this thread, because a backward runs in threads that cannot look up their context."""
        self._ids = {context_id for context_id in self._ids if gradients_in_context(context_id) is not None}
        here = current_context_id()
        if here is not None:
            self._ids.add(here)

    def _make_hook(self, index: int) -> Callable[..., None]:
        parameter = self._parameters[index]

        def gradient_is_ready(*_: object) -> None:
            for context_id in self._ids:
                if parameter in (gradients_in_context(context_id) or ()):
                    self._gradient_is_ready(index, context_id)
                    return

        return gradient_is_ready

    @contextmanager
    def as_grad(self, context_id: int) -> Iterator[None]:
        """Put the context's gradients into `.grad`; at the end, copy the results back and restore `.grad`."""
        in_context = gradients_in_context(context_id) or {}
        before = [parameter.grad for parameter in self._parameters]
        theirs = [in_context.get(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, theirs, strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            for parameter, gradient, former in zip(self._parameters, theirs, before, strict=True):
                reduced, parameter.grad = parameter.grad, former
                if gradient is not None and reduced is not None and reduced is not gradient:
                    gradient.copy_(reduced)
