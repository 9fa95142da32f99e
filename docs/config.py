"""Prints docs/config.md: the keys of a run's configuration and the configurations that are shipped.

`python docs/config.py > docs/config.md`; a test compares the two.
"""

from summa3d.cli.config import page

if __name__ == "__main__":
    print(page(), end="")
