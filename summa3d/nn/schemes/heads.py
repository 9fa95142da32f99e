"""How the columns of attention's linear layers are split: whole heads, or pieces of a kv head that ranks share."""

from __future__ import annotations

from typing import NamedTuple

from ..config import ModelConfig
from .scheme import Scheme


class HeadSplit(NamedTuple):
    """How many columns stay together, of the projections of q (with k and v where heads have their own) and of kv, and of k.

    sharing : how many consecutive ranks hold pieces of one kv head; 1 where each holds whole heads
    """

    of_q: int
    of_kv: int
    sharing: int

    @property
    def of_k(self) -> int:
        """Columns of k, or of v, that stay together."""
        return max(1, self.of_kv // 2)


def heads_of(config: ModelConfig, scheme: Scheme) -> HeadSplit:
    """The split of the heads of a model: as evenly as they come, and whole kv heads with their query heads where it is uneven.

    Where kv heads divide the number of shards, ranks share them, if each has equal pieces and as many query heads, or there is
    but one.
    """
    size, groups = config.head_size, config.num_kv_heads
    num_shards = scheme.after_linear(scheme.residual).num_shards(-1, scheme.shape)
    if not config.grouped:
        return HeadSplit(scheme.whole_columns(config.heads, size), scheme.whole_columns(config.heads, 3 * size), 1)
    sharing = num_shards // groups if num_shards % groups == 0 else 1
    alike = config.heads % num_shards == 0 and 2 * size % sharing == 0
    if sharing > 1 and (groups == 1 or alike):
        return HeadSplit(scheme.whole_columns(config.heads, size), 1, sharing)
    return HeadSplit(scheme.whole_columns(groups, config.attention_width // groups), scheme.whole_columns(groups, 2 * size), 1)
