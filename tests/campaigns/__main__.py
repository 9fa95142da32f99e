"""`python tests/campaigns KIND --cases 2000 --ranks 4 --seed 1`: run a campaign, and print what its cases end with."""

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(TESTS), str(TESTS.parent)]

KINDS = ("hostile", "misuses", "threads", "forks", "interrupts", "traffic", "faults", "pieces", "plans", "modules")

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        kind = sys.argv.pop(1)
        sys.exit(importlib.import_module(f"campaigns.{kind}").main())
    sys.exit(f"python tests/campaigns KIND …, KIND one of: {', '.join(KINDS)}; each has --help")
