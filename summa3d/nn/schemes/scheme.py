"""A tensor-parallel scheme as a value: the layouts of activations and parameters, and the products that connect them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from ...comm.topology import OUTER
from ...errors import LayoutError
from ...gemm.algorithms.plan import ProductPlan
from ...layout.layout import Layout
from ..config import ModelConfig
from .registry import SCHEME_SPECS, SchemeSpec, is_sequence_fine, row_axes
from .validate import EVENLY_SPLIT, check_grid, check_sizes, check_vectors

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
class UnevenRows:
    """The rows of an activation that axes split unevenly: `batch` sequences of `sequence` positions, of which none is parted."""

    batch: int
    sequence: int

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.batch * self.sequence


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

    def plan(self, layout: Layout, form: str, m: int | UnevenRows, n: int, k: int, columns: int = 1) -> ProductPlan:
        """The plan of C (m×n): the product of an activation in `layout` with a weight ("nn") or a table ("nt").

        m : the rows; as `UnevenRows` they are whole sequences and positions. columns : of C, those that stay together.
        Raises LayoutError where the scheme has no product for that layout.
        """
        rows = m if isinstance(m, int) else m.total
        try:
            plan = self.spec.plan(layout, form, rows, n, k)
            if isinstance(m, int) and columns == 1 and not layout.grains:
                return plan
            of_rows = () if isinstance(m, int) else (m.sequence, -m.sequence if is_sequence_fine(layout) else m.sequence)
            return replace(plan, grains=(of_rows, (columns, columns), layout.grains[-1] if layout.grains else ()))
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

    def after_linear(self, layout: Layout, together: int = 1) -> Layout:
        """The layout of a linear layer's output for an input in `layout`. together : columns of it that stay together"""
        c_layout = self.plan(layout, "nn", 1, 1, 1, together).c_layout
        rows, columns = c_layout.dims
        names = layout.names and (*layout.names[:-1], "n")
        if is_sequence_fine(layout):
            result = Layout(rows[:1], rows[1:], columns, names=names)
        else:
            result = Layout(rows, *((),) * (len(layout.dims) - 2), columns, root_only=c_layout.root_only, names=names)
        return result.grained(*((),) * (len(layout.dims) - 1), c_layout.grains[1]) if c_layout.grains else result

    def weight(self, layout: Layout, transposed: bool = False, together: int = 1) -> Layout:
        """The layout of the weight [k, n] of a linear layer whose input has `layout`.

        transposed : whether the product is with the weight's transpose (form nt). together : columns that stay together
        """
        if transposed:
            return self.table(layout, together).transposed()
        return self.plan(layout, "nn", 1, 1, 1, together).b_layout

    def table(self, layout: Layout, together: int = 1) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form nt) for a residual stream in `layout`."""
        return self.plan(layout, "nt", 1, 1, 1, together).b_layout

    def vector(self, layout: Layout) -> Layout:
        """The stored layout of a vector along the last dim of an activation in `layout`."""
        rows, columns, grains = row_axes(layout), layout.dims[-1], layout.grains[-1:]
        if self.vectors == "root-only":
            return Layout(columns, root_only=rows, grains=grains)
        if self.vectors == "diagonal":
            return Layout((*columns, rows[0]), root_only=rows[1:], follows={rows[1]: columns[0]}, grains=grains)
        return Layout(columns, root_only=layout.root_only, grains=grains)

    def whole_columns(self, items: int, size: int) -> int:
        """Number of columns within a branch that stay together, where items of `size` columns do.

        1 where the axes that split the columns divide the items: then any balanced split keeps them whole.
        """
        return size if items % self.after_linear(self.residual).num_shards(-1, self.shape) else 1

    def rows(self, batch: int, sequence: int) -> UnevenRows | None:
        """The rows of an activation where blocks of them differ; None where axes divide batch and sequence."""
        of_batch, of_sequence = self._row_shards
        return None if batch % of_batch == sequence % of_sequence == 0 else UnevenRows(batch, sequence)

    @property
    def fewest_rows(self) -> int:
        """The fewest sequences of which all ranks hold as many, at least one."""
        return self._row_shards[0]

    @cached_property
    def _row_shards(self) -> tuple[int, int]:
        """Into what batch and sequence split, of the residual stream and within a branch."""
        outer, inner = self.residual, self.after_linear(self.residual)
        of_batch = lcm(*(layout.num_shards(0, self.shape) for layout in (outer, inner)))
        return of_batch, outer.num_shards(1, self.shape)

    @property
    def lookup(self) -> Lookup:
        """Kind of an embedding's look-up: the table's fine axis is all-gathered where it splits the tokens as well."""
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
        """Raise LayoutError where a model cannot run on the grid: on every rank alike, before any communication.

        `batch` and `sequence` are the global b and s of one micro-batch; s defaults to the model's. Those of a model with experts
        must split evenly: ranks that exchange tokens tell each other the counts of as many sequences; so must all of one of
        Transformers, whose own code computes with them.
        """
        if self.spec.limits:
            raise LayoutError(
                f"The {self.name} scheme runs single layers, such as nn.MLP, not whole models: {self.spec.limits}.\n"
                f"  Schemes for models: {', '.join(spec.name for spec in SCHEME_SPECS.values() if not spec.limits)}."
            )
        if config.family == "hf":
            self.check_even(config, batch, sequence)
        elif config.num_experts:
            self.check_even(config, batch, sequence, ("batch", "sequence"))

    def check_even(
        self, config: ModelConfig, batch: int, sequence: int | None = None, dims: Collection[str] = EVENLY_SPLIT
    ) -> None:
        """Raise LayoutError, naming values and grids that fit, where ranks would hold unlike parts of a dim.

        `batch` and `sequence` are the global b and s of one micro-batch; s defaults to the model's. A model runs all the same, in
        whole sequences, positions and heads, of which some ranks hold one more than others, or none.
        """
        inner = self.after_linear(self.residual)
        check_sizes(self.spec, inner, self.shape, config, batch, config.sequence if sequence is None else sequence, dims)


def spec_of(name: str) -> SchemeSpec:
    """Return the spec of a scheme. Raises LayoutError for an unknown name."""
    if not isinstance(name, str) or name not in SCHEME_SPECS:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(SCHEME_SPECS)}.")
    return SCHEME_SPECS[name]
