"""`python -m summa3d …` runs `summa3d …`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
