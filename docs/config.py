"""Prints docs/config.md: the keys of a run's configuration and the configurations that are shipped.

`python docs/config.py > docs/config.md`; a test compares the two.
"""

from summa3d.cli.config import keys
from summa3d.nn.config import named_models
from summa3d.train import config as configuration


def page() -> str:
    """The page."""
    lines = [
        "# Configuration keys",
        "",
        "What `summa3d train` reads from a TOML file or from `--set KEY=VALUE`. `summa3d config KEY` shows a key,",
        "`summa3d config --toml` a file with all of them. `python docs/config.py` prints this page.",
        "",
        "## Shipped configurations",
        "",
        "| name | |",
        "|---|---|",
        *(f"| `{name}` | {title} |" for name, title in configuration.shipped().items()),
        "",
        f"Models have a configuration each by name, without a corpus: {', '.join(f'`{name}`' for name in named_models())}.",
    ]
    table = None
    for key in (key for key in keys() if key.name not in configuration.HIDDEN):
        before = key.name.rpartition(".")[0]
        if before != table:
            lines += ["", f"## {f'Table `{before}`' if before else 'Top level'}", "", "| key | type | default | meaning |"]
            lines.append("|---|---|---|---|")
            table = before
        lines.append(f"| `{key.name}` | {key.kind} | `{key.default}` | {key.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
