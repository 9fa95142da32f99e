"""ViT: an encoder of image patches and a classifier, on any scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd.collectives import sum_gradient
from ...errors import ShapeError
from ...layout.distribute import collect
from ..config import ModelConfig
from ..context import Context, check_split
from ..layers.dropout import Batch
from ..layers.embedding import Positions
from ..layers.linear import Linear
from ..layers.norm import new_norm
from ..parameter import initialise, new_parameter
from .base import Body, Inputs
from .batch_check import check_ids


class ViT(Body):
    """An encoder of images: a linear layer embeds the patches, and a classifier reads the class token at position 0.

    ``model(images, labels)`` takes the *global* images [b, channels, side, side] and labels [b], equal on every rank; each rank
    uses its blocks. It returns the global mean loss on every rank. The patch embedding's output has the residual stream's
    layout, so its input has the layout of a linear layer's output: the axes that split those columns split the pixels.
    Raises LayoutError or ShapeError for images that the scheme cannot split or that differ from the configuration's; DataError
    for labels outside the classes, which are checked on the host only.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__(config, scheme, seed)
        self.side, self.patch, self.channels, self.classes = config.image_sizes
        pixels = self.channels * self.patch**2
        first, last = scheme.on_ends(first=True), scheme.on_ends(last=True)
        self.patches = Linear(pixels, config.hidden, first, scheme.scheme.after_linear(scheme.residual), dtype=dtype)
        layout = scheme.scheme.vector(scheme.residual)
        self.class_token = new_parameter(first, layout, (config.hidden,), ("normal", 0.02), dtype, decay=False)
        self.positions = Positions(config.sequence, config.hidden, first, dtype=dtype)
        self.add_blocks(dtype)
        self.norm = new_norm(config, last, dtype=dtype)
        self.head = Linear(config.hidden, self.classes, last, scheme.scheme.pooled, dtype=dtype)
        initialise(self, scheme, seed)

    def forward(self, images: Tensor, labels: Tensor, step: int = 0, first_row: int = 0, count: int | None = None) -> Tensor:
        """The loss of a micro-batch.

        Parameters
        ----------
        images : global [b, channels, side, side]; each rank converts its block to the model's dtype
        labels : global [b]; labels < 0 are not counted
        step, first_row : the step of the run, and the index of row 0 in the step's whole batch; they key the dropout masks
        count : the divisor of the sum; default the counted labels of this micro-batch
        """
        inputs = {"images": images, "labels": labels}
        return self.loss_of(inputs, self.batch_of(inputs, step, first_row, count))

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """The global logits [b, classes] on every rank. images : global [b, channels, side, side]"""
        inputs = {"images": images}
        batch = self.batch_of(inputs)
        logits = self._class_logits(self.encoded(inputs, batch), batch)
        return collect(logits, self.context.grid, self.head.output_layout, (len(images), self.classes))

    def check(self, inputs: Inputs) -> None:
        """Raise LayoutError, ShapeError or DataError for images or labels that the model cannot take."""
        images, labels, shape = inputs["images"], inputs.get("labels"), (self.channels, self.side, self.side)
        if labels is not None and labels.shape != images.shape[:1]:
            raise ShapeError(f"labels have shape {tuple(labels.shape)}; {len(images)} images need shape ({len(images)},).")
        check_ids("labels", labels, self.classes, f"there are {self.classes} classes", ignored=True)
        if images.shape[1:] != shape:
            raise ShapeError(f"images have shape {tuple(images.shape)}; the model takes [batch, {', '.join(map(str, shape))}].")
        check_split(self.context.contexts, self.context.scheme, self.config, len(images))

    def leave(self, x: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of the classes, which the class token predicts."""
        logits = self._class_logits(x, batch)
        return self.loss(logits, inputs["labels"], self.head.output_layout, self.classes, batch.count)

    def _class_logits(self, x: Tensor, batch: Batch) -> Tensor:
        """[b/(XY), s, h/Z] → this rank's block of [b, classes]."""
        return self.head(self.context.tokens_at(self.norm(x)), batch.rows)

    def enter(self, inputs: Inputs, batch: Batch) -> Tensor:
        """Class token and patches with positions, after dropout, [b/(XY), s, h/Z]."""
        images, context, grid = inputs["images"], self.context, self.context.grid
        whole = (batch.rows, batch.sequence, self.patches.k)
        rows, _, pixels = self.patches.input_layout.slices(whole, grid.shape, grid.coordinates)
        flat = self._flattened(images[rows])[..., pixels].to(self.patches.weight.dtype)
        x = self.patches(context.as_stored(flat), context.scheme.rows(batch.rows, batch.sequence))
        first = torch.arange(batch.sequence, device=images.device).expand(batch.rows, -1) == 0
        vector = context.broadcast_vector(self.class_token, context.residual, self.config.hidden)
        token = sum_gradient(vector, context.vector_rows(context.residual))
        x = torch.where(context.as_stored(context.block_of(first, context.residual))[..., None], token, x)
        return self._drop(self.positions(x, batch.sequence), batch)

    def _flattened(self, images: Tensor) -> Tensor:
        """[b, channels, side, side] → [b, 1 + patches, channels·patch²]: zeros for the class token, then the patches."""
        patches = images.unflatten(2, (-1, self.patch)).unflatten(4, (-1, self.patch))  # [b, c, rows, patch, columns, patch]
        flat = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return torch.cat((flat.new_zeros(len(flat), 1, flat.shape[2]), flat), 1)
