// Two ways over [rows, columns]: by tiles, for what is computed element by element, and row by row, for what is summed over rows.
// Tiles: a thread keeps its columns and takes every lanes-th row, so a column's bias is read once and its gradient summed in
// registers. Indices have 64 bits; blocks take tiles or rows in turn, so any grid size is right. Imports blocks.cuh. Next: *.cu.
#pragma once
#include "blocks.cuh"

// across: threads of a block side by side, a divisor of its threads. lanes: walks down the columns, a multiple of threads/across.
struct Tiles {
    int64 rows, columns, lanes, across;
};

// Where a walk is. count: how many of its pack's elements exist.
struct Place {
    int64 lane, column;
    int count;
};

// Runs a copy of `walk` down every lane of every N columns: begin(place), row(place, r) for each of the lane's rows, end(place).
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

// Calls visit(thread, column, count) for the packs of one row. A row that begins between two accesses, at `row`, begins with a
// part of a pack, so that all others are aligned.
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
