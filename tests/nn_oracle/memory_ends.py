"""Closed forms of what a model holds before its blocks and after them, family by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from summa3d.layout.layout import Layout

from .memory_layers import LayerMemory
from .memory_peak import Step

TYPES = 2  # of tokens (BERT)
INDEX = 8  # bytes of a token id


def _table(layers: LayerMemory, rows: int) -> int:
    """Bytes of a parameter [rows, h] that is added to the stream: equal where rows are split, however vectors are stored."""
    return layers.master * layers.block(Layout((), layers.scheme.residual.dims[-1]), rows, layers.config.hidden)


def _lookup(layers: LayerMemory) -> Step:
    """An index and a byte a token are kept; the table is gathered, and what was found is summed."""
    config, scheme, stream = layers.config, layers.scheme, layers.stream
    lookup = scheme.lookup
    tokens = layers.block(lookup.tokens, layers.batch, layers.sequence)
    table = scheme.table(scheme.residual)
    shard = layers.word * layers.block(table, config.vocabulary, config.hidden)
    part = layers.word * layers.block(Layout(lookup.part, table.dims[1]), config.vocabulary, config.hidden)
    found = tokens * stream // max(layers.rows(scheme.residual), 1)
    summed = 2 * found if layers.context.grid[lookup.part].size > 1 else 0
    gathered = part if layers.context.grid[lookup.gathered].size > 1 else 0
    gradients = layers.master * (shard // layers.word) * (not config.tied)
    saved = tokens * (INDEX + 1)
    return Step(saved, saved + gathered + 2 * found + summed, 2 * found + summed + 2 * part, gradients)


def _positions(layers: LayerMemory) -> Step:
    positions = _table(layers, layers.config.sequence)
    return Step(0, 2 * layers.stream, 2 * layers.stream + positions, positions)


def _dropped(layers: LayerMemory) -> list[Step]:
    """Dropout on the stream's first value."""
    return [layers.residual()] if layers.config.dropout else []


def _tokens(layers: LayerMemory) -> list[Step]:
    return [_lookup(layers), *_dropped(layers)]


def _tokens_at_positions(layers: LayerMemory) -> list[Step]:
    return [_lookup(layers), _positions(layers), *_dropped(layers)]


def _typed_tokens(layers: LayerMemory) -> list[Step]:
    types = Step(0, 3 * layers.stream, 2 * layers.stream, _table(layers, TYPES))
    return [_lookup(layers), _positions(layers), types, layers.norm(), *_dropped(layers)]


def _patches(layers: LayerMemory) -> list[Step]:
    """The pixels of this rank's images, then of its columns, are copied; where the class token goes, is kept."""
    config, scheme, inner, stream = layers.config, layers.scheme, layers.inner, layers.stream
    pixels = layers.activation(Layout(*inner.dims[:2], ()), pixels_of(layers))
    own = layers.activation(inner, pixels_of(layers))
    copied = own < pixels or scheme.spec.sequence_first
    places = layers.rows(scheme.residual) if scheme.spec.sequence_first else layers.batch * layers.sequence  # a view of all
    token = layers.vector(scheme.residual, config.hidden)
    return [
        Step(0, 2 * pixels + own * copied, 0),
        layers.linear(inner, pixels_of(layers), config.hidden),
        Step(places, places + 2 * stream, 3 * stream, token),
        _positions(layers),
        *_dropped(layers),
    ]


def pixels_of(layers: LayerMemory) -> int:
    """Numbers of a patch of an image."""
    _, patch, channels, _ = layers.config.image_sizes
    return channels * patch**2


def _logits(layers: LayerMemory) -> list[Step]:
    """The head by a table, and the loss."""
    config, scheme, inner = layers.config, layers.scheme, layers.inner
    need = layers.product(scheme.residual, "nt", config.hidden, config.vocabulary)
    logits, rows = layers.activation(inner, config.vocabulary), layers.rows(inner)
    bias = layers.vector(inner, config.vocabulary) if config.family == "bert" else 0
    held = layers.master * (need.b // layers.word) + bias
    return [
        Step(need.kept_a + need.kept_b, need.forward, need.backward, held, gathers=need.gathers),
        _loss(layers, logits, rows),
    ]


def _loss(layers: LayerMemory, logits: int, rows: int) -> Step:
    """It keeps the softmax and a number a row; on a device the logits and three numbers. Labels are laid as the rows are."""
    labels = INDEX * rows if layers.scheme.spec.sequence_first else 0
    if layers.device:
        return Step(logits + 3 * rows * layers.master + labels, logits, logits)
    wide = layers.master * (logits // layers.word)
    narrow = logits if wide > logits else 0  # in 16 bits, beside those in float32; and so their gradient
    return Step(wide + rows * layers.master + labels, narrow + 2 * wide, narrow + wide)


def _language_head(layers: LayerMemory) -> list[Step]:
    return [layers.norm(), *_logits(layers)]


def _two_heads(layers: LayerMemory) -> list[Step]:
    """BERT's transform with GELU and norm, back to the stream's layout, and logits; for each sequence, pooler and relation.

    The relation's part of the stream's gradient comes first and waits for the other's.
    """
    h, scheme = layers.config.hidden, layers.scheme
    inner = layers.activation(layers.inner, h)
    transform = [layers.linear(scheme.residual, h, h), Step(inner, 2 * inner, 2 * inner), layers.norm(layers.inner)]
    tokens = [replace(step, carried=layers.stream) for step in (*transform, *_logits(layers))]
    pooler = layers.linear(scheme.pooled, h, h, rows=layers.batch, seen=_sees_first_tokens(layers))
    pooled = scheme.after_linear(scheme.pooled)
    need = layers.product(pooled, "nn", h, 2, layers.batch)
    tanh = Step(need.a if need.kept_a != need.a else 0, 2 * need.a, 2 * need.a)  # its output, unless the relation keeps that
    return [*tokens, _first_tokens(layers), pooler, tanh, *_classifier(layers, pooled, 2)]


def _image_head(layers: LayerMemory) -> list[Step]:
    """Return where the first tokens are seen in the normalised stream, that is kept for them."""
    seen = _sees_first_tokens(layers)
    first = replace(_first_tokens(layers), saved=layers.stream if seen else 0)
    return [layers.norm(), first, *_classifier(layers, layers.scheme.pooled, layers.config.image_sizes[3], seen)]


def _sees_first_tokens(layers: LayerMemory) -> bool:
    """Return whether every sequence's first token is a view of the stream: where the sequence is stored first, on one rank."""
    sequence = layers.scheme.residual.dims[1]
    return bool(sequence) and layers.context.columns(Layout(sequence)).size == 1


def _first_tokens(layers: LayerMemory) -> Step:
    """Their gradient is one of the whole stream."""
    return Step(0, layers.stream, layers.stream)


def _classifier(layers: LayerMemory, layout: Layout, classes: int, seen: bool = False) -> list[Step]:
    """One of `classes` for each sequence, from an activation [b, h] in `layout`; and the loss."""
    output = layers.scheme.after_linear(layout)
    sequences = layers.block(Layout(output.dims[0]), layers.batch)
    kept = sequences * (layers.block(Layout(output.dims[-1]), classes) + 1) * layers.master
    linear = layers.linear(layout, layers.config.hidden, classes, rows=layers.batch, seen=seen)
    return [linear, Step(kept, 2 * kept, kept)]


ENDS: dict[str, tuple[Callable[[LayerMemory], list[Step]], Callable[[LayerMemory], list[Step]]]] = {
    "gpt2": (_tokens_at_positions, _language_head),
    "llama": (_tokens, _language_head),
    "bert": (_typed_tokens, _two_heads),
    "vit": (_patches, _image_head),
}
"""By family, what comes before the blocks and after them."""
