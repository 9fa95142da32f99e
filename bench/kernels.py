"""Bandwidth of each fused kernel as a fraction of the bandwidth of a device-to-device copy, at 64 M elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from common import conclude, note, options, save
from gpu import milliseconds, without_gpu
from summa3d.kernels import load
from summa3d.kernels.mask import Mask
from summa3d.kernels.rows import Fused
from torch import Tensor

SHARE = 0.85
COLUMNS = 4096  # of every matrix; a head of the rotary positions has 128 elements
HEAD = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Case(NamedTuple):
    """A kernel, and the bytes that it must read and write: every operand once, without vectors and row statistics."""

    name: str
    run: Callable[[], object]
    bytes: int


class _Summed:
    """A completed reduction over one rank."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def wait(self) -> Tensor:
        """The sum."""
        return self.value


def cases(fused: Fused, elements: int, dtype: torch.dtype) -> Iterator[Case]:
    """All kernels on `elements` elements of `dtype`. The backward of a norm reads its operands twice, in two passes."""
    rows = elements // COLUMNS
    word = dtype.itemsize * rows * COLUMNS
    new = lambda *shape: torch.randn(shape, dtype=dtype, device=fused.device)  # noqa: E731
    x, other, third = (new(rows, COLUMNS) for _ in range(3))
    bias, labels = new(COLUMNS), torch.randint(0, COLUMNS, (rows,), device=fused.device)
    mask = Mask(12345 << 64 | 678, 0, (rows, COLUMNS), (COLUMNS, 1), lambda: x)
    for form in ("gelu_tanh", "gelu", "relu2"):
        yield Case(f"bias + {form}", lambda form=form: fused.bias_activation(x, bias, form), 2 * word)
        yield Case(f"… backward ({form})", lambda form=form: fused.bias_activation_gradient(other, x, bias, form), 3 * word)
    yield Case("SwiGLU", lambda: fused.swiglu(x, other), 3 * word)
    yield Case("… backward", lambda: fused.swiglu_gradient(third, x, other), 5 * word)
    yield Case("bias + dropout + residual", lambda: fused.dropout_add(x, mask, 0.1, other, bias), 3 * word)
    yield Case("… backward", lambda: fused.dropout_gradient(x, mask, 0.1, summed=True), 2 * word)
    mean, inverse = fused.norm_statistics(fused.norm_sums(x), COLUMNS, 1e-5, dtype)
    yield Case("layer norm, sums", lambda: fused.norm_sums(x), word)
    yield Case("layer norm, normalise", lambda: fused.norm(x, mean, inverse, bias, bias), 2 * word)
    gradient = lambda: fused.norm_gradient(other, x, bias, mean, inverse, COLUMNS, _Summed)  # noqa: E731
    yield Case("layer norm, backward", gradient, 5 * word)
    gradient = lambda: fused.norm_gradient(other, x, bias, None, inverse, COLUMNS, _Summed)  # noqa: E731
    yield Case("RMS norm, sums", lambda: fused.norm_sums(x, centred=False), word)
    yield Case("RMS norm, normalise", lambda: fused.norm(x, None, inverse, bias, None), 2 * word)
    yield Case("RMS norm, backward", gradient, 5 * word)
    maximum = fused.row_maximum(x)
    _, sums = fused.cross_entropy_sums(x, maximum, labels, 0)
    kept, scale = fused.cross_entropy_kept(x, maximum, sums[:, 0]), torch.ones_like(maximum)
    yield Case("cross entropy, maximum", lambda: fused.row_maximum(x), word)
    yield Case("cross entropy, sums", lambda: fused.cross_entropy_sums(x, maximum, labels, 0), word)
    yield Case("cross entropy, gradient", lambda: fused.cross_entropy_gradient(kept, labels, 0, scale), 2 * word)
    heads, length = x.view(-1, 32, 32, HEAD), 32
    angles = torch.randn(length, HEAD // 2, device=fused.device)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    yield Case("rotary positions", lambda: fused.rotate(heads, cosine, sine), 2 * word)
    single = 4 * rows * COLUMNS
    state = [torch.zeros(rows, COLUMNS, device=fused.device) for _ in range(4)]
    copies = None if dtype == torch.float32 else [x]
    arguments = ([state[0]], [state[1]], [state[2]], [state[3]], [1], 1e-3, (0.9, 0.99), 1e-8, 0.1)
    update = lambda: fused.adamw(*arguments, factor=0.5, copies=copies)  # noqa: E731
    yield Case("AdamW", update, 7 * single + (word if copies else 0))


def main() -> None:
    """Time all kernels and copies in each dtype, and print whether the claim holds."""
    parser = options(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 26, help="Set the number of elements of an operand.")
    parser.add_argument("--repeat", type=int, default=20, help="Time this many calls of each kernel.")
    args = parser.parse_args()
    if without_gpu("the fused kernels' bandwidth"):
        return
    fused = load.fused(torch.device("cuda", torch.cuda.current_device()))
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "elements": args.elements, "kernels": []}
    for name, dtype in DTYPES.items():
        source = torch.empty(args.elements, dtype=dtype, device=fused.device)
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / median(milliseconds(lambda to=target, of=source: to.copy_(of), args.repeat))
        del source, target
        print(f"{name}: a copy moves {copied / 1e9:.2f} TB/s")
        for case in cases(fused, args.elements, dtype):
            moved = case.bytes / median(milliseconds(case.run, args.repeat))
            result["kernels"].append({"dtype": name, "kernel": case.name, "bytes_per_s": moved * 1e3, "share": moved / copied})
            print(f"  {case.name:28} {moved / 1e9:5.2f} TB/s  {moved / copied:4.0%} of the copy's")
    worst = min(result["kernels"], key=lambda kernel: kernel["share"])
    note(f"slowest: {worst['kernel']} in {worst['dtype']}")
    conclude([(f"every kernel at ≥ {SHARE:.0%} of a copy's bandwidth (least {worst['share']:.0%})", worst["share"] >= SHARE)])
    save(result, args.json)


if __name__ == "__main__":
    main()
