// SwiGLU, y = SiLU(gate)·up, and the gradients of both from gate and up alone. gate and up may be columns of one matrix.
#include "arithmetic.cuh"
#include "walk.cuh"

template <class T> struct Swiglu {
    static constexpr int N = LANES<T>;
    const T *gate, *up;
    T* y;
    int64 gate_stride, up_stride, columns;

    SUMMA3D_FUNCTION void begin(Place) {}

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        Compute<T> g[N], u[N];
        load(g, gate + row * gate_stride + at.column, at.count);
        load(u, up + row * up_stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) g[i] = g[i] * sigmoid<sizeof(T) == 2>(g[i]) * u[i];
        store(y + row * columns + at.column, g, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

template <class T> struct SwigluGradient {
    static constexpr int N = LANES<T>;
    const T *gradient, *gate, *up;
    T *gate_gradient, *up_gradient;
    int64 gradient_stride, gate_stride, up_stride, columns;

    SUMMA3D_FUNCTION void begin(Place) {}

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        Compute<T> d[N], g[N], u[N];
        load(d, gradient + row * gradient_stride + at.column, at.count);
        load(g, gate + row * gate_stride + at.column, at.count);
        load(u, up + row * up_stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            const Compute<T> s = sigmoid<sizeof(T) == 2>(g[i]);
            const Compute<T> slope = s * (Compute<T>(1) + g[i] * (Compute<T>(1) - s));
            u[i] *= d[i] * slope;
            d[i] *= g[i] * s;
        }
        store(gate_gradient + row * columns + at.column, u, at.count);
        store(up_gradient + row * columns + at.column, d, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

#define MAKE(T, dtype) \
    SUMMA3D_KERNEL( \
        swiglu_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, Swiglu<T>{gate, up, y, gate_stride, up_stride, columns})), \
        const T* gate, const T* up, T* y, int64 gate_stride, int64 up_stride, int64 rows, int64 columns, int64 lanes, \
        int64 across) \
    SUMMA3D_KERNEL( \
        swiglu_gradient_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    SwigluGradient<T>{gradient, gate, up, gate_gradient, up_gradient, gradient_stride, gate_stride, up_stride, \
                                      columns})), \
        const T* gradient, const T* gate, const T* up, T* gate_gradient, T* up_gradient, int64 gradient_stride, \
        int64 gate_stride, int64 up_stride, int64 rows, int64 columns, int64 lanes, int64 across)
SUMMA3D_FOR_EACH_DTYPE(MAKE)
