"""A tensor-parallel scheme as a value: the layouts of activations and parameters, and the products that connect them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...comm.topology import OUTER
from ...errors import LayoutError
from ...gemm.algorithms.plan import ProductPlan
from ...layout.layout import Layout
from ..config import ModelConfig
from .registry import SCHEME_SPECS, SchemeSpec, is_sequence_fine, row_axes
from .validate import check_grid, check_sizes, check_vectors

SCHEMES = tuple(SCHEME_SPECS)


@dataclass(frozen=True)
class Lookup:
    """How an embedding looks up rows of a table [v, h] to form the residual stream.

    Attributes
    ----------
    tokens : the layout of the tokens [b, s] that a rank looks up
    gathered : the axis along which the table is all-gathered first, if any
    part : the axes that then still split v, over which the rows are summed
    copies : the axes that split the tokens but not the table, over which the table's gradient is summed
    """

    tokens: Layout
    gathered: tuple[str, ...]
    part: tuple[str, ...]
    copies: tuple[str, ...]


@dataclass(frozen=True)
class Scheme:
    """The layouts and products of a transformer on a grid of given sizes: a value, without ranks and communication.

    A linear layer maps the layout of its input to another one, and two linear layers return to the residual stream's layout.
    Each layer holds the layouts of its own input and output. Every layout is that of an operand of the spec's product.

    Attributes
    ----------
    spec : the scheme as data
    sizes : inner axis and its size, of all axes of the inner grid
    vectors : how γ, β and biases are stored

    >>> found = Scheme.of("cuboid", {"x": 2, "y": 2})
    >>> str(found.residual), str(found.after_linear(found.residual)), found.shape
    ('b:(x,y) s h:z', 'b:(x,z) s n:y', {'x': 2, 'y': 2, 'z': 1})
    """

    spec: SchemeSpec
    sizes: tuple[tuple[str, int], ...]
    vectors: str = "copied"

    @classmethod
    def of(cls, name: str, shape: Mapping[str, int], vectors: str = "copied") -> Scheme:
        """Return the scheme called `name` on a grid of `shape`, whose outer axes (dp, pp, cp, ep) are left out.

        Raises LayoutError and GridError as `scheme` does.
        """
        spec = spec_of(name)
        inner = {axis: size for axis, size in shape.items() if axis not in OUTER}
        check_grid(spec, inner)
        check_vectors(spec, inner, vectors)
        return cls(spec, tuple({**inner, **{axis: 1 for axis in spec.axes if axis not in inner}}.items()), vectors)

    @property
    def name(self) -> str:
        """The scheme's name, a key of `SCHEME_SPECS`."""
        return self.spec.name

    @cached_property
    def shape(self) -> dict[str, int]:
        """Axis name → size of the inner grid."""
        return dict(self.sizes)

    @property
    def residual(self) -> Layout:
        """The layout of the residual stream [b, s, h]."""
        return self.spec.residual

    @property
    def down_form(self) -> str:
        """The form of a feed-forward layer's down projection: "nn", or "nt" with its weight's transpose."""
        return "nt" if self.spec.transposed_down else "nn"

    def plan(self, layout: Layout, form: str, m: int, n: int, k: int) -> ProductPlan:
        """The plan of C (m×n): the product of an activation in `layout` with a weight ("nn") or a table ("nt").

        Raises LayoutError where the scheme has no product for that layout.
        """
        try:
            return self.spec.plan(layout, form, m, n, k)
        except ValueError as error:  # an axis more or less than those of its activations
            raise LayoutError(
                f"The {self.name} scheme has no product for an activation in layout {layout}; its residual stream has "
                f"{self.residual}."
            ) from error

    def block(self, config: ModelConfig, rows: int) -> list[ProductPlan]:
        """The plans of the products of a block's weights, in order, for activations of `rows` rows."""
        stream, forms = self.residual, ("nn", "nn", "nn", self.down_form)
        layouts = (stream, self.after_linear(stream)) * 2
        sizes = zip(layouts, forms, config.matrices, strict=True)
        return [self.plan(layout, form, rows, n, k) for layout, form, (k, n) in sizes]

    def after_linear(self, layout: Layout) -> Layout:
        """The layout of a linear layer's output for an input in `layout`."""
        c_layout = self.plan(layout, "nn", 1, 1, 1).c_layout
        rows, columns = c_layout.dims
        names = layout.names and (*layout.names[:-1], "n")
        if is_sequence_fine(layout):
            return Layout(rows[:1], rows[1:], columns, names=names)
        return Layout(rows, *((),) * (len(layout.dims) - 2), columns, root_only=c_layout.root_only, names=names)

    def weight(self, layout: Layout, transposed: bool = False) -> Layout:
        """The layout of the weight [k, n] of a linear layer whose input has `layout`.

        transposed : whether the product is with the weight's transpose (form nt)
        """
        return self.table(layout).transposed() if transposed else self.plan(layout, "nn", 1, 1, 1).b_layout

    def table(self, layout: Layout) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form nt) for a residual stream in `layout`."""
        return self.plan(layout, "nt", 1, 1, 1).b_layout

    def vector(self, layout: Layout) -> Layout:
        """The stored layout of a vector along the last dim of an activation in `layout`."""
        rows, columns = row_axes(layout), layout.dims[-1]
        if self.vectors == "root-only":
            return Layout(columns, root_only=rows)
        if self.vectors == "diagonal":
            return Layout((*columns, rows[0]), root_only=rows[1:], follows={rows[1]: columns[0]})
        return Layout(columns, root_only=layout.root_only)

    @property
    def lookup(self) -> Lookup:
        """How an embedding looks up its table: the table's fine axis is all-gathered where it splits the tokens as well."""
        split, rows = self.table(self.residual).dims[0], row_axes(self.residual)
        gathered = split[-1:] if split[-1] in rows else ()
        part = split[: len(split) - len(gathered)]
        tokens = Layout(*([axis for axis in axes if axis not in part] for axes in self.residual.dims[:2]))
        return Lookup(tokens, gathered, part, tuple(axis for axis in rows if axis not in split))

    @property
    def pooled(self) -> Layout:
        """The layout of one token per sequence, [b, h], which `tokens_at` returns."""
        return Layout(row_axes(self.residual), self.residual.dims[-1])

    def check(self, config: ModelConfig, batch: int, sequence: int | None = None) -> None:
        """Raise LayoutError where a dim cannot be split as the scheme needs: on every rank alike, before any communication.

        `batch` and `sequence` are the global b and s of one micro-batch; s defaults to the model's. Batch, heads and the dims
        that the residual stream splits must split evenly; all other dims may be uneven.
        """
        if self.spec.limits:
            raise LayoutError(
                f"The {self.name} scheme runs single layers, such as nn.MLP, not whole models: {self.spec.limits}.\n"
                f"  Schemes for models: {', '.join(spec.name for spec in SCHEME_SPECS.values() if not spec.limits)}."
            )
        inner = self.after_linear(self.residual)
        check_sizes(self.spec, inner, self.shape, config, batch, config.sequence if sequence is None else sequence)


def spec_of(name: str) -> SchemeSpec:
    """Return the spec of a scheme. Raises LayoutError for an unknown name."""
    if not isinstance(name, str) or name not in SCHEME_SPECS:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(SCHEME_SPECS)}.")
    return SCHEME_SPECS[name]
