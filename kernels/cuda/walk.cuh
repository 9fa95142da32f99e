// Two grid-stride loops over [rows, columns]: by tiles for element-wise kernels, row by row for kernels that sum along rows.
// By tiles, a thread keeps its columns and takes every lanes-th row: a column's bias is read once, and its gradient is summed in
// registers. Indices have 64 bits, and any number of blocks is correct.
#pragma once
#include "blocks.cuh"

// across: the threads of a block side by side, a divisor of its threads. lanes: the stride of a thread's rows, a multiple of
// threads/across.
struct Tiles {
    int64 rows, columns, lanes, across;
};

// The position of a thread: its lane, its first column, and `count`, how many of its N columns exist.
struct Place {
    int64 lane, column;
    int count;
};

// Runs a copy of `walk` for every lane of every N columns: begin(place), row(place, r) for each of the lane's rows, end(place).
template <class Walk, class Block> SUMMA3D_FUNCTION void walk_tiles(Block& block, Tiles tiles, const Walk& walk) {
    block.each([&](int thread) {
        const int across = int(tiles.across), right = thread % across, below = thread / across;
        const int64 width = int64(across) * Walk::N, down = block.threads() / across;
        const int64 strips = divide(tiles.columns + width - 1, width).quotient, steps = divide(tiles.lanes, down).quotient;
        for (int64 tile = block.index(); tile < strips * steps; tile += block.count()) {
            const Divided at = divide(tile, strips);
            const int64 column = at.rest * width + right * Walk::N;
            if (column >= tiles.columns) continue;
            const Place place = {at.quotient * down + below, column, at_most(tiles.columns - column, Walk::N)};
            Walk mine = walk;
            mine.begin(place);
            for (int64 row = place.lane; row < tiles.rows; row += tiles.lanes) mine.row(place, row);
            mine.end(place);
        }
    });
}

// Calls visit(thread, column, count) for each run of at most N columns of one row. Where the address `row` is not 16-byte
// aligned, the first run is shorter, so that all others are aligned.
template <int N, class T, class Block, class Visit>
SUMMA3D_FUNCTION void walk_row(Block& block, const T* row, int64 columns, Visit visit) {
    const int64 skew = int64(((uint64)row % ACCESS) / sizeof(T));
    block.each([&](int thread) {
        for (int64 first = int64(thread) * N - skew; first < columns; first += int64(block.threads()) * N) {
            const int64 column = first < 0 ? 0 : first;
            const int64 end = first + N < columns ? first + N : columns;
            if (end > column) visit(thread, column, int(end - column));
        }
    });
}
