// An activation with the bias fused, y = f(x + bias), f GELU in tanh or exact form, or ReLU²; and the gradients of x and bias.
// Backward recomputes x + bias. The bias gradient has two phases: each lane writes its partial sum, and columns.cu adds the lanes.
#include "arithmetic.cuh"
#include "walk.cuh"

template <class T, class F> struct BiasActivation {
    static constexpr int N = LANES<T>;
    const T *x, *bias;
    T* y;
    int64 stride, columns;  // x's rows are `stride` elements apart; y is contiguous
    Compute<T> b[N];

    SUMMA3D_FUNCTION void begin(Place at) { load(b, bias + at.column, bias ? at.count : 0); }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        Compute<T> v[N];
        load(v, x + row * stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) v[i] = F::value(v[i] + b[i]);
        store(y + row * columns + at.column, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

template <class T, class F> struct BiasActivationGradient {
    static constexpr int N = LANES<T>;
    const T *gradient, *x, *bias;
    T* x_gradient;
    Compute<T>* bias_parts;  // [lanes, columns], or null
    int64 gradient_stride, stride, columns;
    Compute<T> b[N], sum[N];

    SUMMA3D_FUNCTION void begin(Place at) {
        load(b, bias + at.column, bias ? at.count : 0);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) sum[i] = 0;
    }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        Compute<T> v[N], g[N];
        load(v, x + row * stride + at.column, at.count);
        load(g, gradient + row * gradient_stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            v[i] = g[i] * F::slope(v[i] + b[i]);
            sum[i] += v[i];
        }
        store(x_gradient + row * columns + at.column, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place at) {
        if (bias_parts) store(bias_parts + at.lane * columns + at.column, sum, at.count);
    }
};

#define MAKE(T, Form, name, dtype) \
    SUMMA3D_KERNEL( \
        bias_##name##_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    BiasActivation<T, Form<sizeof(T) == 2, Compute<T>>>{x, bias, y, stride, columns, {}})), \
        const T* x, const T* bias, T* y, int64 stride, int64 rows, int64 columns, int64 lanes, int64 across) \
    SUMMA3D_KERNEL( \
        bias_##name##_gradient_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    BiasActivationGradient<T, Form<sizeof(T) == 2, Compute<T>>>{ \
                        gradient, x, bias, x_gradient, bias_parts, gradient_stride, stride, columns, {}, {}})), \
        const T* gradient, const T* x, const T* bias, T* x_gradient, Compute<T>* bias_parts, int64 gradient_stride, \
        int64 stride, int64 rows, int64 columns, int64 lanes, int64 across)
#define MAKE_ALL(T, dtype) \
    MAKE(T, TanhGelu, gelu_tanh, dtype) MAKE(T, ExactGelu, gelu, dtype) MAKE(T, SquaredRelu, relu2, dtype)
SUMMA3D_FOR_EACH_DTYPE(MAKE_ALL)
