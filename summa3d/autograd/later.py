# Sums of weights' gradients that are waited for later in backward, where nothing waits for them any more. Needs torch.
# A weight passes through a node of autograd's graph that is ordered behind the layers that follow; its backward is the wait.
# Imports comm. Next: matmul.py, which puts pending sums in the mail; recompute.py, whose second graph sends mail out of itself.
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.pending import Pending
from ..errors import ConfigError


class Mail:
    """The sums of one weight's gradient that are in flight, on their way to the node that waits for them.

    here : whether that node is in the graph of who holds the mail, or in one around it.
    """

    def __init__(self, here: bool = True) -> None:
        self.here = here
        self.pending: list[Pending] = []

    def forwarded(self) -> Mail:
        """The same mail, to be sent from a graph inside."""
        inside = Mail(here=False)
        inside.pending = self.pending
        return inside

    def wanted(self, node: Any) -> bool:
        """Whether this backward will come to `node`, the next one after the sender: else nobody would open the mail."""
        return not self.here or bool(torch._C._will_engine_execute_node(node))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, later: Later, mail: Mail) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.later, ctx.mail = later, mail
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        for sent in ctx.later.opened(ctx.mail):
            grad = sent if grad is None else grad + sent
        return grad, None, None


class Later:
    """At most `limit` sums of weights' gradients in flight behind the layers that follow in backward; of one grid.

    Autograd runs the nodes that are ready in the order of their numbers, latest first. A weight's node takes the number of the
    node of the weight used `limit` uses before: backward comes to it when that many products have been differentiated since.
    So whoever reads a gradient (hooks, `grad`, sums of several uses) reads a complete one, and backward leaves nothing behind.
    Raises ConfigError where torch cannot order its nodes.
    """

    def __init__(self, limit: int) -> None:
        if not hasattr(torch._C._FunctionBase, "_set_sequence_nr"):
            raise ConfigError(f"overlap.weight_gradient needs a newer torch than {torch.__version__}, or 0.")
        self.limit = limit
        self._flying: deque[Pending] = deque()
        self._numbers: deque[int] = deque([0] * limit, maxlen=limit)

    def take(self, weight: Tensor) -> tuple[Tensor, Mail]:
        """`weight` for one product, and where the product sends the sum of its gradient."""
        mail = getattr(weight, "mail", None)
        if mail is not None:
            return weight, mail
        return self._waiting([weight])[0]

    def take_out(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Mail | None]]:
        """`weights` for a stretch that is computed again, whose products in their graph send to this one."""
        own = {id(weight): weight for weight in weights if _summed(weight)}
        waiting = dict(zip(own, self._waiting(list(own.values())), strict=True))
        return [waiting.get(id(weight)) or (weight, getattr(weight, "mail", None)) for weight in weights]

    def _waiting(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Mail]]:
        mails = [Mail() for _ in weights]
        nodes: list[Any] = [_Wait.apply(weight, self, mail) for weight, mail in zip(weights, mails, strict=True)]
        number = self._numbers[0]
        if nodes:
            self._numbers.append(nodes[0].grad_fn._sequence_nr())
        for node in nodes:
            node.grad_fn._set_sequence_nr(number)
        return list(zip(nodes, mails, strict=True))

    def send(self, mail: Mail, pending: Pending) -> None:
        """Put a started sum in the mail; the oldest in flight is completed where there are more than the limit."""
        mail.pending.append(pending)
        self._flying.append(pending)
        while len(self._flying) > self.limit:
            self._flying.popleft().wait()

    def opened(self, mail: Mail) -> list[Tensor]:
        """The complete sums of what was sent."""
        sent = mail.pending[:]
        mail.pending.clear()
        for pending in sent:
            if pending in self._flying:
                self._flying.remove(pending)
        return [pending.wait() for pending in sent]


def _summed(weight: Tensor) -> bool:
    """Whether products may have its gradient to send: a matrix, of which nobody outside waits already."""
    return weight.dim() > 1 and weight.requires_grad and not hasattr(weight, "mail")
