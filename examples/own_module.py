"""Your own torch module of summa3d layers, saved and resumed: mpiexec -n 8 python -m mpi4py examples/own_module.py [--resume]"""

import sys

import torch
from mpi4py import MPI

import summa3d
from summa3d.layout import distribute
from summa3d.train import ZeroAdamW, load_checkpoint, replica_rows, save_checkpoint

grid = summa3d.Grid(MPI.COMM_WORLD, {"dp": 2, "x": 2, "z": 2})
cuboid = summa3d.nn.scheme("cuboid", grid)
up = summa3d.nn.Linear(10, 13, cuboid)  # [b, s, 10] b:(x,y) s h:z → [b, s, 13] b:(x,z) s f:y
down = summa3d.nn.Linear(13, 10, cuboid, up.output_layout)  # and back to the layout it began in
model = torch.nn.Sequential(up, torch.nn.GELU(), down)
summa3d.nn.initialise(model, cuboid, seed=1)  # the same weights on every grid
optimizer = ZeroAdamW(model, lr=0.01, max_norm=1.0)  # its step sums gradients over dp, and clips by the norm of the whole
done = load_checkpoint("checkpoints", model, optimizer) if "--resume" in sys.argv else 0
data = torch.randn(8, 5, 10, generator=torch.Generator().manual_seed(0))
x = distribute(data[replica_rows(grid, 8)], cuboid.grid, cuboid.residual)  # this rank's block of its replica's rows


def loss_of() -> torch.Tensor:
    return (model(x) - x).square().sum() / data.numel()  # this rank's part of the global mean


for step in range(done + 1, 21):
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()
    if step % 10 == 0:
        save_checkpoint("checkpoints", step, model, optimizer)  # any grid loads it
summa3d.nn.check_copies(model)  # raises where ranks that hold the same block no longer agree
state = summa3d.nn.full_state_dict(model)  # whole tensors, [outputs, inputs] as in torch.nn.Linear
total = grid.world.all_reduce(loss_of().detach().reshape(1)).item()
if grid.rank == 0:
    print(f"loss {total:.3f}, norm {optimizer.norm:.2f}, 0.weight {list(state['0.weight'].shape)}")
