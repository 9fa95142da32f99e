"""Misuses of the API: wrong calls on ranks under a plain `mpiexec python`, and right ones after each.

`python tests/campaigns misuses --cases 2000 --ranks 4 --seed 1` prints a table of what they end with. A call is held where it
raises one of ours, or gives what numpy gives; another exception, a wrong number, a hang, a dead job, a wrong call after it are
findings.
"""

from __future__ import annotations

from campaigns import core
from campaigns.misuses_of_axes import channels, collective, message
from campaigns.misuses_of_grids import freed, gradients, grids, inner_grids, products, redistributions
from campaigns.misuses_of_memory import odd_gradients, remains, shared, tampered
from campaigns.misuses_of_models import checkpoints, layers, models

KIND = core.Kind(
    *("misuses", "misuses"),
    (
        *((collective, 8), (message, 2), (grids, 3), (redistributions, 3), (products, 3), (gradients, 3), (freed, 1)),
        *((channels, 3), (inner_grids, 2), (models, 3), (layers, 1), (checkpoints, 2)),
        *((shared, 2), (tampered, 2), (odd_gradients, 1), (remains, 2)),
    ),
)


def main() -> int:
    """Run the campaign of the command line."""
    return core.main(KIND, __doc__)
