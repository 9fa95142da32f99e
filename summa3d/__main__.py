# `python -m summa3d …` is `summa3d …`.
# May import cli only.
# Next: cli/main.py.
from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
