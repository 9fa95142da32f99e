"""Layers of summa3d in your own torch module and optimizer: mpiexec -n 8 python -m mpi4py examples/own_module.py"""

import torch
from mpi4py import MPI

import summa3d
from summa3d.layout import distribute

grid = summa3d.Grid(MPI.COMM_WORLD, {"x": 2, "y": 2, "z": 2})
cuboid = summa3d.nn.scheme("cuboid", grid)
up = summa3d.nn.Linear(10, 13, cuboid)  # [b, s, 10] b:(x,y) s h:z → [b, s, 13] b:(x,z) s f:y
down = summa3d.nn.Linear(13, 10, cuboid, up.output_layout)  # and back to the layout it began in
model = torch.nn.Sequential(up, torch.nn.GELU(), down)
summa3d.nn.initialise(model, cuboid, seed=1)  # the same weights on every grid
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(8, 5, 10, generator=torch.Generator().manual_seed(0))
for _step in range(20):
    y = model(distribute(x, grid, cuboid.residual))
    loss = (y - distribute(x, grid, cuboid.residual)).square().sum() / x.numel()  # this rank's part of the global mean
    optimizer.zero_grad()
    loss.backward()  # gradients are complete: nothing else to reduce
    summa3d.nn.clip_grad_norm_(model, 1.0)  # torch's own would take the norm of this rank's blocks alone
    optimizer.step()
summa3d.nn.check_copies(model)  # raises where ranks that hold the same block no longer agree
total = grid.world.all_reduce(loss.detach().reshape(1)).item()
if grid.rank == 0:
    print(f"loss {total:.3f}")
