"""C = A·Aᵀ and A·Aᴴ of one matrix: half of a product's arithmetic. Plans, their choice, and what executes them."""
