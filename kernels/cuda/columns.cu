// The second phase of a sum down columns: adds the lanes' partial sums of the gradients of biases, γ and β. One block adds 32
// columns of one vector: its threads stride over the lanes, then the block adds its threads' sums.
#include "walk.cuh"

template <class T, class Block>
SUMMA3D_FUNCTION void sum_lanes(Block& block, const Compute<T>* parts, T* sums, int64 vectors, int64 lanes, int64 columns) {
    const int64 strips = (columns + SUMMED_ACROSS - 1) / SUMMED_ACROSS;
    for (int64 tile = block.index(); tile < strips * vectors; tile += block.count()) {
        const Divided at = divide(tile, strips);
        typename Block::template Each<Compute<T>> sum(block);
        block.each([&](int thread) {
            const int64 column = at.rest * SUMMED_ACROSS + thread % SUMMED_ACROSS;
            sum[thread] = 0;
            for (int64 lane = thread / SUMMED_ACROSS; lane < lanes && column < columns; lane += block.threads() / SUMMED_ACROSS)
                sum[thread] += parts[(at.quotient * lanes + lane) * columns + column];
        });
        block.sum_down(sum, SUMMED_ACROSS);
        block.each([&](int thread) {
            const int64 column = at.rest * SUMMED_ACROSS + thread;
            if (thread < SUMMED_ACROSS && column < columns) narrow(sum[thread], sums[at.quotient * columns + column]);
        });
    }
}

#define MAKE(T, dtype) \
    SUMMA3D_KERNEL(sum_lanes_##dtype, (sum_lanes<T>(block, parts, sums, vectors, lanes, columns)), const Compute<T>* parts, \
                   T* sums, int64 vectors, int64 lanes, int64 columns)
SUMMA3D_FOR_EACH_DTYPE(MAKE)
