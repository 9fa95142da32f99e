// Dropout with bias and residual fused, y = residual + dropout(x + bias), and its backward. The mask is a function of the global
// element index and is never stored. A thread takes 8 elements at a time, as many as one Philox counter serves.
#include "philox.cuh"
#include "walk.cuh"

// Which numbers of the random stream a block's elements take (mask.py). The block's rows have three indices: k < inner (fastest),
// j < middle, and i. Row (i, j, k) begins at number origin + i·outer_stride + j·middle_stride + k·inner_stride; its columns take
// consecutive numbers. An element is kept where its number is at least `threshold`.
struct Mask {
    int64 origin, middle, inner, outer_stride, middle_stride, inner_stride;
    uint64 key0, key1;
    uint32 threshold;

    // A bit for each of the 8 elements from `column` of a row: 1 where the element is kept.
    SUMMA3D_FUNCTION uint32 kept(int64 row, int64 column) const {
        const Divided low = divide(row, inner), high = divide(low.quotient, middle);
        const int64 begin = origin + high.quotient * outer_stride + high.rest * middle_stride + low.rest * inner_stride;
        return kept_from(begin + column, key0, key1, threshold);
    }
};

template <class T> struct DropoutAdd {
    static constexpr int N = NUMBERS;
    const T *x, *bias, *residual;
    T* y;
    int64 columns;
    Compute<T> scale;
    Mask mask;
    Compute<T> b[N];

    SUMMA3D_FUNCTION void begin(Place at) { load(b, bias + at.column, bias ? at.count : 0); }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        const int64 here = row * columns + at.column;
        Compute<T> v[N], r[N];
        load(v, x + here, at.count);
        load(r, residual + here, residual ? at.count : 0);
        const uint32 kept = mask.kept(row, at.column);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) v[i] = r[i] + (kept >> i & 1 ? (v[i] + b[i]) * scale : Compute<T>(0));
        store(y + here, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

template <class T> struct DropoutGradient {
    static constexpr int N = NUMBERS;
    const T* gradient;
    T* x_gradient;
    Compute<T>* bias_parts;  // [lanes, columns], or null
    int64 columns;
    Compute<T> scale;
    Mask mask;
    Compute<T> sum[N];

    SUMMA3D_FUNCTION void begin(Place) {
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) sum[i] = 0;
    }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        const int64 here = row * columns + at.column;
        Compute<T> v[N];
        load(v, gradient + here, at.count);
        const uint32 kept = mask.kept(row, at.column);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            v[i] = kept >> i & 1 ? v[i] * scale : Compute<T>(0);
            sum[i] += v[i];
        }
        store(x_gradient + here, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place at) {
        if (bias_parts) store(bias_parts + at.lane * columns + at.column, sum, at.count);
    }
};

#define MASK \
    Mask { \
        origin, middle, inner, outer_stride, middle_stride, inner_stride, uint64(key0), uint64(key1), uint32(threshold) \
    }
#define MASK_PARAMETERS \
    int64 origin, int64 middle, int64 inner, int64 outer_stride, int64 middle_stride, int64 inner_stride, int64 key0, \
        int64 key1, int64 threshold
#define MAKE(T, dtype) \
    SUMMA3D_KERNEL( \
        dropout_add_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    DropoutAdd<T>{x, bias, residual, y, columns, Compute<T>(scale), MASK, {}})), \
        const T* x, const T* bias, const T* residual, T* y, double scale, MASK_PARAMETERS, int64 rows, int64 columns, \
        int64 lanes, int64 across) \
    SUMMA3D_KERNEL( \
        dropout_gradient_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    DropoutGradient<T>{gradient, x_gradient, bias_parts, columns, Compute<T>(scale), MASK, {}})), \
        const T* gradient, T* x_gradient, Compute<T>* bias_parts, double scale, MASK_PARAMETERS, int64 rows, int64 columns, \
        int64 lanes, int64 across)
SUMMA3D_FOR_EACH_DTYPE(MAKE)
