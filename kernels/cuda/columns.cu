// Sums down columns. sum_lanes, the second phase of the gradients of biases, γ and β, adds the lanes' partial sums. One block
// adds 32 columns of one vector: its threads stride over the lanes, then the block adds its threads' sums. sum_parts adds the
// 16-bit parts of a reduce-scatter in their order, as the host does: a thread adds its columns in registers and rounds once.
#include "walk.cuh"

template <class T> struct SumParts {
    static constexpr int N = LANES<T>;
    const T* parts;
    T* out;
    int64 many, columns;

    SUMMA3D_FUNCTION void begin(Place at) {
        Compute<T> sum[N], next[N];
        load(sum, parts + at.column, at.count);
        for (int64 part = 1; part < many; ++part) {
            load(next, parts + part * columns + at.column, at.count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) sum[i] += next[i];
        }
        store(out + at.column, sum, at.count);
    }

    SUMMA3D_FUNCTION void row(Place, int64) {}
    SUMMA3D_FUNCTION void end(Place) {}
};

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

#define MAKE_PARTS(T, dtype) \
    SUMMA3D_KERNEL( \
        sum_parts_##dtype, \
        (walk_tiles(block, Tiles{1, columns, 1, block.threads()}, SumParts<T>{parts, out, many, columns})), const T* parts, \
        T* out, int64 many, int64 columns)
MAKE_PARTS(bfloat16, bfloat16)
MAKE_PARTS(float16, float16)
