"""A table as text, Markdown, CSV, LaTeX, HTML or a DataFrame."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .columns import aligned
from .errors import ConfigError

LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "×": r"$\times$", "÷": r"$\div$"},
        **{"–": "--", "·": r"$\cdot$", "³": "$^3$", "≥": r"$\ge$", "≤": r"$\le$"},
    }
)


@dataclass(frozen=True)
class Column:
    """A column of a table: its values, None where there is none, and how a value is shown; CSV holds the values themselves.

    csv_only, shown_only : whether it stands in CSV alone, or in all other formats alone
    """

    name: str
    values: Sequence[Any]
    show: Callable[[Any], str] = str
    left: bool = False
    csv_only: bool = False
    shown_only: bool = False

    @property
    def cells(self) -> list[str]:
        """The values as text, "–" where there is none."""
        return ["–" if value is None else self.show(value) for value in self.values]


@dataclass(frozen=True)
class Table:
    """A title, columns, remarks, and the label that LaTeX refers to. Columns without any value are left out."""

    title: str
    columns: Sequence[Column]
    remarks: Sequence[str] = ()
    label: str = ""

    @property
    def filled(self) -> list[Column]:
        """The columns that hold a value."""
        return [column for column in self.columns if any(value is not None for value in column.values)]

    @property
    def shown(self) -> list[Column]:
        """The columns of a table for readers, whose title says what stands in CSV only."""
        return [column for column in self.filled if not column.csv_only]

    def text(self) -> str:
        """The table in aligned columns.

        >>> print(Table("times", [Column("name", ["a"], left=True), Column("ms", [1.5])]).text())
        times
        name   ms
        a     1.5
        """
        rows = list(zip(*([column.name, *column.cells] for column in self.shown), strict=True))
        lines = aligned(rows, left=[place for place, column in enumerate(self.shown) if column.left])
        return "\n".join([*filter(None, [self.title]), *lines, *self.remarks])

    def markdown(self) -> str:
        """The table in Markdown."""
        rules = (":--" if column.left else "--:" for column in self.shown)
        rows = ((cell.replace("|", "\\|") for cell in cells) for cells in self._rows())
        lines = [f"| {' | '.join(cells)} |" for cells in ((column.name for column in self.shown), rules, *rows)]
        return "\n\n".join(filter(None, [self.title, "\n".join(lines), *self.remarks]))

    def csv(self) -> str:
        """The values as CSV, with a line of names and without title and remarks."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        columns = [column for column in self.filled if not column.shown_only]
        writer.writerow(column.name for column in columns)
        writer.writerows(zip(*(column.values for column in columns), strict=True))
        return out.getvalue().rstrip("\n")

    def latex(self) -> str:
        """A LaTeX table for the package booktabs, with the title and the remarks as its caption."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(cell.translate(LATEX) for cell in cells) + r" \\"

        sentences = [f"{text[0].upper()}{text[1:].rstrip('.')}." for text in (self.title, *self.remarks) if text]
        caption = " ".join(sentences).translate(LATEX)
        label = [rf"\label{{tab:{self.label}}}"] if self.label else []
        align = "".join("l" if column.left else "r" for column in self.shown)
        return "\n".join(
            [
                *(r"\begin{table}", rf"\caption{{{caption}}}", *label, rf"\begin{{tabular}}{{{align}}}", r"\toprule"),
                *(line([column.name for column in self.shown]), r"\midrule", *map(line, self._rows())),
                *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
            ]
        )

    def html(self) -> str:
        """The table in HTML, as notebooks show it."""

        def row(kind: str, cells: Iterable[str]) -> str:
            sides = ("left" if column.left else "right" for column in self.shown)
            made = (f'<{kind} style="text-align:{side}">{escape(cell)}</{kind}>' for side, cell in zip(sides, cells, strict=True))
            return f"<tr>{''.join(made)}</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        rows = [row("th", (column.name for column in self.shown)), *(row("td", cells) for cells in self._rows())]
        return "\n".join([f"<table>{caption}", *rows, "</table>", *(f"<p>{escape(remark)}</p>" for remark in self.remarks)])

    def to_frame(self) -> Any:
        """The values as a DataFrame, a column a column. Raises ConfigError where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ConfigError("a DataFrame needs pandas, which is not installed: pip install 'summa3d[frame]'.") from error
        columns = [column for column in self.filled if not column.shown_only]
        return pandas.DataFrame({column.name: list(column.values) for column in columns})

    def _rows(self) -> list[Sequence[str]]:
        return list(zip(*(column.cells for column in self.shown), strict=True))


FORMATS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "text": ("txt", Table.text),
    "markdown": ("md", Table.markdown),
    "csv": ("csv", Table.csv),
    "latex": ("tex", Table.latex),
}
"""Formats of a table: the ending of its file, and what writes it."""
