// Rotary positions: rotates the elements i and i + d/2 of each head by the angle of their position; backward by its negative.
// x is [b, heads, s, d] with unit stride in d and any outer strides; y is contiguous.
#include "walk.cuh"

template <class T> struct Rotate {
    static constexpr int N = LANES<T>;
    const T *x, *cosine, *sine;  // tables [s, d/2]
    T* y;
    int64 heads, sequence, outer_stride, head_stride, stride, half;
    Compute<T> direction;  // 1, or −1 for backward

    SUMMA3D_FUNCTION void begin(Place) {}

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        const Divided low = divide(row, sequence), high = divide(low.quotient, heads);
        const T* from = x + high.quotient * outer_stride + high.rest * head_stride + low.rest * stride + at.column;
        const int64 angle = low.rest * half + at.column;
        Compute<T> first[N], second[N], c[N], s[N];
        load(first, from, at.count);
        load(second, from + half, at.count);
        load(c, cosine + angle, at.count);
        load(s, sine + angle, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            const Compute<T> kept = first[i], turned = s[i] * direction;
            first[i] = kept * c[i] - second[i] * turned;
            second[i] = second[i] * c[i] + kept * turned;
        }
        T* to = y + row * 2 * half + at.column;
        store(to, first, at.count);
        store(to + half, second, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

#define MAKE(T, dtype) \
    SUMMA3D_KERNEL( \
        rotate_##dtype, \
        (walk_tiles(block, Tiles{rows, half, lanes, across}, \
                    Rotate<T>{x, cosine, sine, y, heads, sequence, outer_stride, head_stride, stride, half, \
                              Compute<T>(direction)})), \
        const T* x, const T* cosine, const T* sine, T* y, double direction, int64 heads, int64 sequence, int64 outer_stride, \
        int64 head_stride, int64 stride, int64 rows, int64 half, int64 lanes, int64 across)
SUMMA3D_FOR_EACH_DTYPE(MAKE)
