"""What became of each layer of an adopted module, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ...columns import aligned
from ...gemm.algorithms.plan import ProductPlan
from ...gemm.cost.volume import of_plan
from ..layers.fused_linear import FusedLinear
from ..layers.linear import Linear
from .layers import FusedParts, VocabularyHead, WholeHeads


@dataclass(frozen=True)
class AdoptedLayer:
    """A row: the name of a module or parameter; what it was; what it is, with its layouts; the layer, if it is one.

    together : the product that it makes with others of the same input, whose words are the first one's
    whole : makes heads of it whole that ranks share
    """

    name: str
    was: str
    now: str
    layer: nn.Module | None = None
    together: FusedLinear | None = None
    whole: WholeHeads | None = None

    def words(self, rows: int) -> int:
        """The words that the fullest rank receives in its forward product of so many rows (batch · sequence); 0 of others.

        Those of heads that it makes whole are added.
        """
        gathered = 0 if self.whole is None else self.whole.words(rows)
        if self.together is not None and self.together.linears[0] is not self.layer:
            return gathered
        plan = _plan(self.together or self.layer, rows)
        return gathered + (0 if plan is None else of_plan(plan[0], plan[1]).max_words)


@dataclass
class Adoption:
    """What became of each layer: `str` prints a table, in which layers that differ in their numbers alone are one row."""

    layers: list[AdoptedLayer] = field(default_factory=list)

    def table(self, rows: int | None = None) -> str:
        """The table, with the words of each layer's forward product of so many rows (batch · sequence)."""
        grouped: dict[tuple[str, ...], int] = {}
        for layer in self.layers:
            name = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
            row = (name, layer.was, layer.now, *([f"{layer.words(rows):,}"] if rows else []))
            grouped[row] = grouped.get(row, 0) + 1
        lines = [(f"{name} ×{count}" if count > 1 else name, *rest) for (name, *rest), count in grouped.items()]
        head = ("layer", "was", "is", *(["words each"] if rows else []))
        return "\n".join(aligned([head, *lines], left=(0, 1, 2)))

    def __str__(self) -> str:
        return self.table()


def _plan(layer: nn.Module | FusedLinear | None, rows: int) -> tuple[ProductPlan, dict[str, int]] | None:
    """The plan of a layer's product, and the grid it is on."""
    if isinstance(layer, FusedParts):
        layer = layer.joined
    together = 1
    if isinstance(layer, FusedLinear):
        context, layout, form, k, together = layer.context, layer.layout, "nn", layer.linears[0].k, layer.together
        n = sum(linear.n for linear in layer.linears)
    elif isinstance(layer, Linear):
        context, layout, form, n, k = layer.context, layer.input_layout, "nn", layer.n, layer.k
    elif isinstance(layer, VocabularyHead):
        context, layout, form, n, k = layer.context, layer.context.residual, "nt", layer.vocabulary, layer.hidden
    else:
        return None
    return context.scheme.plan(layout, form, rows, n, k, together), context.scheme.shape
