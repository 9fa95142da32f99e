"""Products bound to a grid together with their gradients, each gradient callable alone.

The set is closed: every gradient of NN, NT, TN and TT is a product of the same algorithm on the layouts at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, is_grad_enabled

from ..comm.axis import Axis
from ..comm.device.arrays import address, dtype_name, empty
from ..comm.grid import BaseGrid, agree_on_call
from ..comm.pending import Completed, Pending
from ..errors import GridError, ShapeError
from ..gemm.algorithms.cuboid import Cuboid, CuboidPlan
from ..gemm.algorithms.executor import Executor
from ..gemm.algorithms.gradients import GRADIENTS, Gradient, gradient_plans
from ..gemm.algorithms.oned import OnedPlan
from ..gemm.algorithms.plan import ProductPlan
from ..gemm.algorithms.registry import algorithm_of
from ..gemm.algorithms.workspace import Workspace
from ..gemm.any_layout.executor import AnyProduct
from ..gemm.any_layout.plan import AnyPlan, Owned
from ..gemm.any_layout.planned import plan_any
from ..gemm.pieces.arrivals import GatheredBehind
from ..gemm.pieces.slabs import multiply_in_slabs, start_sums
from ..gemm.pieces.timing import axes_between_nodes
from ..gemm.symmetric.executor import SymmetricProduct
from ..gemm.symmetric.plan import SymmetricPlan
from ..layout.layout import Layout
from .deferred import PassState
from .prefetch import PrefetchSource


@dataclass(frozen=True)
class InFlight:
    """What a product may have in flight.

    Attributes
    ----------
    source : the prefetch source of B; None for no prefetch
    input_gradient : whether dA's sum is in flight while dB is computed
    state : of the pass that runs, which may defer dB; None, dB is never deferred
    """

    source: PrefetchSource | None = None
    input_gradient: bool = True
    state: PassState | None = None


class Product(ABC):
    """C = op(A)·op(B) (+ bias) on a grid, with its gradients, each callable alone.

    Parameters
    ----------
    plan : the sizes and layouts of the product
    rows : the plane of axes that split C's rows, over which a bias gradient is summed; None for a product without bias
    in_flight : what may be in flight, as far as the algorithm supports it

    Raises ShapeError for a form whose gradients are not supported.
    """

    def __init__(self, plan: ProductPlan | AnyPlan, rows: Axis | None = None, in_flight: InFlight = InFlight()) -> None:
        if plan.form not in GRADIENTS:
            raise ShapeError(f"matmul has no gradient for form {plan.form!r}; forms with gradients: {', '.join(GRADIENTS)}.")
        self.plan, self.rows, self.in_flight = plan, rows, in_flight
        self.of_a, self.of_b = GRADIENTS[plan.form]
        self.agreed: set[object] = set()
        """The kinds of calls that all ranks have been found to make alike."""

    executor: Executor | AnyProduct
    """The product without gradients."""

    def agree(self, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        """Raise AgreementError on all ranks unless all call this product: compared at its first use on such operands.

        Raises ShapeError, before that, for operands that are no tensors, or a bias of another size or dtype; and for blocks that
        are not the plan's, which all ranks hear of.
        """
        for name, operand in (("a", a), ("b", b), ("bias", bias)):
            if not isinstance(operand, Tensor) and not (name == "bias" and operand is None):
                raise ShapeError(f"{name} is a {type(operand).__name__}; products with gradients take torch's tensors.")
        graph = is_grad_enabled()
        wanted = (graph and a.requires_grad, graph and b.requires_grad, graph and bias is not None and bias.requires_grad)
        known = (a.dtype, b.dtype, None if bias is None else (bias.dtype, bias.shape), wanted)
        if known in self.agreed and not self.executor.grid.job.check:
            return
        columns = self.executor.c_block[1:]
        if bias is not None and (bias.shape != columns or bias.dtype != a.dtype):
            given, takes = f"{tuple(bias.shape)} {dtype_name(bias)}", f"{columns} {dtype_name(a)}"
            raise ShapeError(f"the block of the bias is {given}; {self.plan} takes {takes} here.")
        dtypes = dtype_name(a), dtype_name(b)
        facts = {"plan": repr(self.plan), "dtypes": dtypes, "bias": bias is not None, "gradients of a, b, bias": wanted}
        refusal = None
        try:
            self.check_blocks(a if a.dim() < 2 else a.flatten(0, -2), b)
        except ShapeError as error:
            refusal = error
        agree_on_call(self.executor.grid, "autograd.matmul", facts, None, None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        self.agreed.add(known)

    def agreeing_with(self, agreed: set[object]) -> Product:
        """This product, which is not compared again for calls that others which share the set have been compared for."""
        self.agreed = agreed
        return self

    def check_blocks(self, a: Tensor, b: Tensor) -> None:
        """Raise ShapeError unless the blocks of both operands, A's as a matrix, are those of the plan."""
        self.executor.check(a, b)

    def items_of_rows(self) -> int:
        """Number of items in this rank's rows of C, where the plan splits rows into items, which may be empty."""
        assert isinstance(self.plan, ProductPlan), "a plan of any layouts has matrices"
        (axes, *_), grid = self.plan.c_layout.dims, self.executor.grid
        grains = self.plan.grains_of("m")
        return Layout(axes[1:]).local_shape((-grains[1],), grid.shape, grid.coordinates)[0]

    def is_torchs(self, a: Tensor, b: Tensor) -> bool:
        """Return whether torch's own linear layer is this product: on one rank, on the host, multiplied by torch, in no trace.

        Its graph is torch's, whose backward calls no Python.
        """
        if not self.is_linear or a.device.type != "cpu" or self.executor.grid.ledger.by_steps:
            return False
        worth = self.executor.grid.job.blas.worth.get(dtype_name(a))
        return worth is None or a.numel() * b.numel() < worth * a.shape[-1]

    @cached_property
    def is_linear(self) -> bool:
        """Return whether C is one product of whole operands, A·B or A·Bᵀ."""
        return self.executor.grid.size == 1 and self.plan.form in ("nn", "nt")

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return this rank's block of C, and the two operands to keep for the gradients."""

    @property
    def source(self) -> PrefetchSource | None:
        """The source from which backward prefetches B; None where backward does not gather B, or does not prefetch it."""
        return None

    @property
    def takes_weight_first(self) -> bool:
        """Return whether backward takes dB before dA: the sum of the first is in flight behind the other's product."""
        return False

    def share(self, c: Tensor) -> Any:
        """Return what both gradients need of dC, computed once: this rank's block, or the gathered dC."""
        return c

    def keep_share(self, c: Tensor, shared: Any) -> Any:
        """Return what a deferred dB keeps of dC, whose block is c, until `share_again`."""
        return c

    def share_again(self, kept: Any) -> Any:
        """Return the shared dC of what `keep_share` kept."""
        return self.share(kept)

    def kept_b(self, b: Tensor) -> Tensor:
        """Return what `forward` keeps of this rank's block of B."""
        return b

    @abstractmethod
    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Start dA from the shared dC and the kept B; its sum over ranks may be in flight when this returns."""

    @abstractmethod
    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Start dB from the shared dC and the kept A; its sum over ranks may be in flight when this returns."""


class ShardedProduct(Product):
    """A product of which replicas hold shards of B's block, by rows (ZeRO-3): B is gathered before each use, dB reduce-scattered.

    Backward keeps the shard. The gathers may be prefetched, and then those of the product itself are not.

    Parameters
    ----------
    product : the product of the whole block, without a prefetch source
    plane : the replicas
    sizes : the rows of each one's shard
    transposed : whether the shards are of Bᵀ
    source : the prefetch source of B's shard; None for no prefetch
    """

    def __init__(
        self, product: Product, plane: Axis, sizes: Sequence[int], transposed: bool, source: PrefetchSource | None = None
    ) -> None:
        super().__init__(product.plan, product.rows, replace(product.in_flight, source=source))
        self.product, self.plane, self.sizes, self.transposed = product, plane, sizes, transposed
        self.executor, self.is_linear = product.executor, False

    def check_blocks(self, a: Tensor, b: Tensor) -> None:
        """Raise ShapeError unless the block of A is the plan's; of B this replica has a shard."""
        self.executor.check_block("A", a, self.executor.a_block)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block, what the product keeps of A, and the shard of B."""
        c, (kept, _) = self.product.forward(a, self._gathered(b, forward=True))
        return c, (kept, b)

    @property
    def source(self) -> PrefetchSource | None:
        """The source of the shard of B."""
        return self.in_flight.source

    def share(self, c: Tensor) -> Any:
        """Return what both gradients need of dC."""
        return self.product.share(c)

    def keep_share(self, c: Tensor, shared: Any) -> Any:
        """Return what the product's deferred dB keeps of dC."""
        return self.product.keep_share(c, shared)

    def share_again(self, kept: Any) -> Any:
        """Return the shared dC of what `keep_share` kept."""
        return self.product.share_again(kept)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Start dA with B gathered again."""
        return self.product.start_grad_a(shared, self.product.kept_b(self._gathered(b, forward=False)))

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Start the sum of dB over the replicas, of which each receives its shard."""
        whole = self.product.start_grad_b(shared, a).wait()
        return self.plane.start_reduce_scatter((whole.t() if self.transposed else whole).contiguous(), sizes=self.sizes)

    def _start(self, shard: Tensor) -> Pending:
        return self.plane.start_all_gather(shard.contiguous(), sizes=self.sizes)

    def _gathered(self, b: Tensor, forward: bool) -> Tensor:
        source = self.in_flight.source
        result = None if source is None else source.prefetcher.gather(source, forward, b, self._start)
        whole: Tensor = self.plane.ledger.track(self._start(b).wait() if result is None else result)
        return whole.t() if self.transposed else whole


class GatheredProduct(Product):
    """The cuboid product: all-gather A and B, multiply, reduce-scatter C; both gradients share one all-gather of dC.

    With `regather`, backward keeps the shards and gathers them again: 1/P of the memory. Without it, backward keeps the
    gathered operands: fewer words.
    """

    executor: Executor

    def __init__(self, cuboid: Cuboid, regather: bool = True, rows: Axis | None = None, in_flight: InFlight = InFlight()) -> None:
        super().__init__(cuboid.plan, rows, in_flight)
        self.cuboid, self.regather = cuboid, regather
        self.executor = cuboid

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block, and the shards or (without `regather`) the gathered operands."""
        self.cuboid.check(a, b)
        if self.cuboid.is_local:
            return self.cuboid.workspace.multiply(a, b, self.plan.form), (a, b)
        view = self.regather  # operands that backward keeps must be copies, not views of a slot
        if self.in_flight.source is None:
            gathered = self.cuboid.gather_both(a, b, view)
        else:
            gathered = self.cuboid.gather_a(a, view), self._gathered_b(b, view, forward=True)
        partial, kept = self.cuboid.multiply(*gathered), (a, b) if self.regather else gathered
        del gathered  # before the reduce-scatter allocates
        return self.cuboid.scatter_c(partial), kept

    def share(self, c: Tensor) -> Any:
        """Return dC gathered along z; a view is valid until the next collective on z."""
        return c if self.cuboid.is_local else self.cuboid.gather_c(c, view=True)

    def keep_share(self, c: Tensor, shared: Any) -> Any:
        """Return this rank's block of dC, or (without `regather`) a copy of the gathered dC."""
        return c if self.regather or shared is c else shared.clone()

    def share_again(self, kept: Any) -> Any:
        """Return dC gathered along z: again, or (without `regather`) as it was kept."""
        return self.share(kept) if self.regather else kept

    def kept_b(self, b: Tensor) -> Tensor:
        """Return the shard of B, or (without `regather`) B gathered along x."""
        return b if self.regather else self.cuboid.gather_b(b, False)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Start dA; the reduce-scatter along y is in flight when this returns."""
        if self.cuboid.is_local:
            return Completed(local(self.cuboid.workspace, self.of_a, shared, b))
        if self.regather:
            b = self._gathered_b(b, view=True, forward=False)
        partial = local(self.cuboid.workspace, self.of_a, shared, b, self.cuboid.summand_buffer("a", shared))
        del b  # the gathered B, before the reduce-scatter allocates
        return self.cuboid.start_scatter_a(partial)

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Start dB; the reduce-scatter along x is in flight when this returns."""
        if self.cuboid.is_local:
            return Completed(local(self.cuboid.workspace, self.of_b, shared, a))
        if self.regather:
            a = self.cuboid.gather_a(a, view=True)
        partial = local(self.cuboid.workspace, self.of_b, shared, a, self.cuboid.summand_buffer("b", shared))
        del a
        return self.cuboid.start_scatter_b(partial)

    @property
    def source(self) -> PrefetchSource | None:
        """The source of B, where x splits B and backward gathers B again."""
        return self.in_flight.source if self.cuboid.x.size > 1 and self.regather else None

    def _gathered_b(self, b: Tensor, view: bool, forward: bool) -> Tensor:
        """Return B gathered along x, prefetched where possible; a prefetched B has a buffer of its own, never a view."""
        gathered = self._prefetched(b, forward, partial(self.cuboid.start_gather, "b"))
        return self.cuboid.gather_b(b, view) if gathered is None else gathered

    def _prefetched(self, b: Tensor, forward: bool, start: Callable[[Tensor], Pending]) -> Any:
        """Return B as its prefetch has it, which `start` begins; None where the product gathers it."""
        source = self.in_flight.source
        if source is None or self.cuboid.x.size == 1:
            return None
        return source.prefetcher.gather(source, forward, b, start, self._taken)

    def _taken(self, pending: Pending) -> Any:
        """Return what the product takes of a prefetch: B gathered, in a buffer of its own."""
        return self.cuboid.ledger.track(pending.wait())


@dataclass
class SharedGradient:
    """dC of a product in pieces: this rank's block, and dC gathered along z once a gradient's product has done so."""

    block: Tensor
    whole: Tensor | None = None


class PiecedCuboidProduct(GatheredProduct):
    """The cuboid product and both gradients in the plan's pieces, each operand behind what is multiplied meanwhile.

    The first gradient gathers dC in pieces, and the second has it; dA's cells are on their way while dB is multiplied, or, where
    dB's sum moves between nodes and dA's does not, the other way round. What is prefetched comes in pieces behind what is waited
    for, the last of them while it is multiplied; as a whole what is gathered in a node's memory, or on devices. Words are those
    of `GatheredProduct`.
    """

    def __init__(self, cuboid: Cuboid, regather: bool = True, rows: Axis | None = None, in_flight: InFlight = InFlight()) -> None:
        super().__init__(cuboid, regather, rows, in_flight)
        self._grad_a, self._grad_b = (Cuboid(plan, cuboid.grid) for plan in gradient_plans(cuboid.plan))

    @cached_property
    def takes_weight_first(self) -> bool:
        """Return whether dB's sum moves between nodes, and dA's does not."""
        between = axes_between_nodes(self.cuboid.plan.axes, self.cuboid.grid)
        return self.cuboid.plan.x in between and self.cuboid.plan.y not in between

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block, and the shards or (without `regather`) the gathered operands."""
        self.cuboid.check(a, b)
        here = self._prefetched(b, True, partial(self.cuboid.start_gather, "b", behind=True))
        started = self.cuboid.start_in_pieces({"a": a, "b": b}, {"b": here} if here is not None else {}, self.regather, False)
        kept = (a, b) if self.regather else (started.gathered["a"], started.gathered["b"])
        return started.wait(), kept

    def share(self, c: Tensor) -> Any:
        """Return dC for both gradients: gathered where the node's memory does it, else as the first of them will gather it."""
        return SharedGradient(c, self.cuboid.gather_c(c, view=True) if self._gathers_as_a_whole(c) else None)

    def keep_share(self, c: Tensor, shared: Any) -> Any:
        """Return this rank's block of dC, or (without `regather`) what the gradients share, no view of a node's memory."""
        if self.regather:
            return c
        return SharedGradient(c, shared.whole.clone()) if self._gathers_as_a_whole(c) else shared

    def _gathers_as_a_whole(self, c: Tensor) -> bool:
        return self.cuboid.z.size > 1 and self.cuboid.z.offers_views(c)

    def _taken(self, pending: Pending) -> Any:
        """Return B gathered, or, between nodes, on its way."""
        return pending if isinstance(pending, GatheredBehind) else super()._taken(pending)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Start dA; its cells along y may be on their way when this returns."""
        start = partial(self._grad_a.start_gather, "b" if self.of_a.c_first else "a", behind=True)
        here = self._prefetched(b, False, start) if self.regather else b
        return self._start(self._grad_a, self.of_a, shared, b, here)

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Start dB; its cells along x may be on their way when this returns."""
        return self._start(self._grad_b, self.of_b, shared, a, None if self.regather else a)

    def _start(self, executor: Cuboid, gradient: Gradient, shared: SharedGradient, other: Tensor, here: Any) -> Pending:
        """Start a gradient's product of dC and the other operand, which is gathered, or on its way, where it is `here`."""
        blocks = dict(zip("ab", gradient.ordered(shared.block, other), strict=True))
        gathered = zip("ab", gradient.ordered(shared.whole, here), strict=True)
        started = executor.start_in_pieces(blocks, {name: item for name, item in gathered if item is not None}, view=True)
        shared.whole = started.gathered["a" if gradient.c_first else "b"]
        return started


class OnedProduct(Product):
    """The two 1-D products of Megatron, column-parallel (n split) and row-parallel (k split); nothing is gathered.

    The row-parallel product all-reduces C (Megatron's g); the column-parallel product all-reduces dA in backward (Megatron's
    f), in the plan's pieces behind what is multiplied meanwhile, dB too. dB needs no sum. The sequence-parallel pair is the
    cuboid of 1×t×1.
    """

    executor: Executor
    plan: OnedPlan

    def __init__(self, plan: OnedPlan, grid: BaseGrid, rows: Axis | None = None, in_flight: InFlight = InFlight()) -> None:
        super().__init__(plan, rows, in_flight)
        if plan.sequence:
            raise ShapeError("A sequence-parallel 1-D plan has no gradients; a CuboidPlan on a grid of 1×t×1 has them.")
        self.executor = algorithm_of(plan).executor(plan, grid)
        self.axis = grid[plan.y]
        self.split = plan.split_dim

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block, all-reduced along y where y splits k, and both shards."""
        self.executor.check(a, b)
        if self.split == "k" and self._cut(a):
            out = empty(self.executor.c_block, a)
            return self._start_sums(self.plan.form, a, b, out).wait(), (a, b)
        c = self.executor.workspace.multiply(a, b, self.plan.form)
        return self.axis.all_reduce(c, into=c) if self.split == "k" else c, (a, b)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Start dA; the all-reduce along y, where y splits the dim that dA sums over, is in flight when this returns."""
        if self.of_a.inner == self.split and self._cut(shared):
            out = empty(self.executor.a_block, shared)
            return self._start_sums(self.of_a.form, *self.of_a.ordered(shared, b), out)
        partial = local(self.executor.workspace, self.of_a, shared, b)
        if self.of_a.inner != self.split:
            return Completed(partial)
        return self.axis.start_all_reduce(partial, into=partial, in_order=True)

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Return dB, which sums over m, which y never splits; pieces of dA may be on their way meanwhile."""
        if self.of_a.inner != self.split or not self._cut(shared):
            return Completed(local(self.executor.workspace, self.of_b, shared, a))
        first, second = self.of_b.ordered(shared, a)
        out = empty(self.executor.b_block, shared)
        whole = a.numel() * shared.shape[1]
        multiply_in_slabs(self.executor.workspace, self.of_b.form, first, second, out, whole)
        return Completed(out)

    def _cut(self, array: Tensor) -> bool:
        """Return whether what moves of such arrays is cut in pieces."""
        return self.plan.cut(self.axis, array)

    def _start_sums(self, form: str, a: Tensor, b: Tensor, out: Tensor) -> Pending:
        """Start op(A)·op(B), whose pieces are summed along y while others are multiplied."""
        return start_sums(self.axis, self.executor.workspace, form, a, b, out, self.plan.pieces)


class ExecutedProduct(Product):
    """A product whose gradients are products of the same algorithm: SUMMA, Tesseract, Agarwal. Backward keeps the shards only.

    `workspace` may be shared by any number of products of one grid: each product is complete when it returns.
    Raises ShapeError where the set is not closed: a gradient would not have its operand's layout.
    """

    executor: Executor

    def __init__(self, plan: ProductPlan, grid: BaseGrid, rows: Axis | None = None, workspace: Workspace | None = None) -> None:
        super().__init__(plan, rows)
        workspace, plans = workspace or Workspace(grid), (plan, *gradient_plans(plan))
        self.executor, self._grad_a, self._grad_b = (algorithm_of(plan).executor(plan, grid, workspace) for plan in plans)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block and both shards."""
        return self.executor.run(a, b), (a, b)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Return dA, complete: the algorithm sums as it goes."""
        return Completed(self._grad_a.run(*self.of_a.ordered(shared, b)))

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Return dB, complete: the algorithm sums as it goes."""
        return Completed(self._grad_b.run(*self.of_b.ordered(shared, a)))


class AnyLayoutProduct(Product):
    """A product of operands in any layouts; its gradients are such products too, each in the layout of its operand.

    Copies of C have copies of one dC, and each copy of an operand receives the whole gradient. Backward keeps the blocks.
    Raises GridError for a plan of two grids.
    """

    executor: AnyProduct

    def __init__(self, plan: AnyPlan, grid: BaseGrid, rows: Axis | None = None) -> None:
        super().__init__(plan, rows)
        if len(plan.spaces) > 1:
            raise GridError(f"{plan!r} is one of two grids; products with gradients live on one.")
        self.executor = AnyProduct(plan, [grid])
        operands = ((self.of_a, plan.b, plan.a), (self.of_b, plan.a, plan.b))
        self.plans = [_any_gradient(plan, grid, gradient, other, own) for gradient, other, own in operands]
        self._grad_a, self._grad_b = (AnyProduct(plan, [grid]) for plan in self.plans)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block and both operands' blocks."""
        self.executor.check(a, b)
        return self.executor.run(a, b), (a, b)

    def start_grad_a(self, shared: Any, b: Tensor) -> Pending:
        """Return dA, complete."""
        return Completed(self._grad_a.run(*self.of_a.ordered(shared, b)))

    def start_grad_b(self, shared: Any, a: Tensor) -> Pending:
        """Return dB, complete."""
        return Completed(self._grad_b.run(*self.of_b.ordered(shared, a)))


class OneMatrixProduct(AnyLayoutProduct):
    """A product of one matrix with its own transpose: `matmul(a, a, product)`, of form nt or tn, by half of the arithmetic.

    Its gradient, (dC + dCᵀ)·A of form nt, is the sum of those that the general product has for either operand.
    Raises ShapeError for a plan whose C stays packed, or operands that are not one block.
    """

    def __init__(self, plan: SymmetricPlan, grid: BaseGrid, rows: Axis | None = None) -> None:
        if plan.c is None:
            raise ShapeError(f"{plan!r} leaves C packed, which has no gradient: plan it with storage='full'.")
        super().__init__(plan.general, grid, rows)
        self._half = SymmetricProduct(plan, grid)

    def check_blocks(self, a: Tensor, b: Tensor) -> None:
        """Raise ShapeError unless both operands are this rank's block of one matrix."""
        super().check_blocks(a, b)
        if address(a) != address(b) or a.stride() != b.stride():
            raise ShapeError("a and b of a product of one matrix are two tensors: pass the same twice, as matmul(a, a, product).")

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return C's block, and A's block twice."""
        self.check_blocks(a, b)
        return self._half.run(a), (a, b)


def _any_gradient(plan: AnyPlan, grid: BaseGrid, gradient: Gradient, other: Owned, own: Owned) -> AnyPlan:
    """Return the plan of an operand's gradient, in the operand's layout: of dC and the other operand."""
    m, n, k = (plan.extents[dim] for dim in gradient.dims)
    first, second = gradient.ordered(plan.c.layout, other.layout)
    return plan_any(
        first, second, m, n, k, grid, own.layout, gradient.form, plan.dtype.name, plan.objective, machine=plan.machine
    )


def product(
    plan: ProductPlan | AnyPlan | SymmetricPlan,
    grid: BaseGrid,
    regather: bool = True,
    rows: Axis | None = None,
    workspace: Workspace | None = None,
    in_flight: InFlight = InFlight(),
) -> Product:
    """Bind `plan` to `grid` as a product with gradients: of an algorithm, of operands in any layouts, or of one matrix.

    Parameters
    ----------
    regather : whether backward gathers the operands again instead of keeping them gathered; read by the cuboid
    rows : the plane over which a bias gradient is summed; None for a product without bias
    workspace : the workspace to share; read by the algorithms whose gradients are products (`ExecutedProduct`)
    in_flight : what may be in flight; read by the cuboid and the 1-D products

    Raises ShapeError for a form or plan without gradients.
    """
    if isinstance(plan, SymmetricPlan):
        return OneMatrixProduct(plan, grid, rows)
    if isinstance(plan, AnyPlan):
        return AnyLayoutProduct(plan, grid, rows)
    if isinstance(plan, CuboidPlan):
        cuboid = Cuboid(plan, grid)
        kind = PiecedCuboidProduct if plan.pieces > 1 and not cuboid.is_local else GatheredProduct
        return kind(cuboid, regather, rows, in_flight)
    if isinstance(plan, OnedPlan):
        return OnedProduct(plan, grid, rows, in_flight)
    return ExecutedProduct(plan, grid, rows, workspace)


def local(workspace: Workspace, gradient: Gradient, c: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply the local operands of `gradient` on this rank, into `out` if given."""
    return workspace.multiply(*gradient.ordered(c, other), gradient.form, out)
