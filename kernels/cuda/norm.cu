// Layer norm (`centred`) and root-mean-square norm, forward and backward, each in two phases: the sums of a row, then what is
// computed with them. Between the phases row sums can be all-reduced over a grid axis. The gradients of γ and β come from the
// second phase of backward, which reads the same operands.
#include "arithmetic.cuh"
#include "walk.cuh"

// Forward, phase 1: Σx (centred only) and Σx² of each row, in Wide<T>.
template <class T, bool centred, class Block>
SUMMA3D_FUNCTION void norm_sums(Block& block, const T* x, Wide<T>* sums, int64 stride, int64 rows, int64 columns) {
    constexpr int N = LANES<T>, TERMS = centred ? 2 : 1;
    typedef Values<TERMS, Wide<T>> Terms;
    for (int64 row = block.index(); row < rows; row += block.count()) {
        typename Block::template Each<Terms> terms(block);
        block.each([&](int thread) { terms[thread] = Terms{}; });
        walk_row<N>(block, x + row * stride, columns, [&](int thread, int64 column, int count) {
            Compute<T> v[N];
            load(v, x + row * stride + column, count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) {
                if (centred) terms[thread].at[0] += v[i];
                terms[thread].at[TERMS - 1] += Wide<T>(v[i]) * Wide<T>(v[i]);
            }
        });
        const Terms all = block.template combine<Add>(terms, Wide<T>(0));
        block.each([&](int thread) {
            if (thread < TERMS) sums[row * TERMS + thread] = thread ? all.at[TERMS - 1] : all.at[0];
        });
    }
}

// Between: mean (centred only) and 1/σ of each row of n elements, from its sums over all ranks.
template <class T, bool centred, class Block>
SUMMA3D_FUNCTION void norm_statistics(
    Block& block, const Wide<T>* sums, Compute<T>* mean, Compute<T>* inverse, double n, double epsilon, int64 rows) {
    block.each([&](int thread) {
        for (int64 row = block.index() * block.threads() + thread; row < rows; row += block.count() * block.threads()) {
            const Wide<T> average = centred ? sums[2 * row] / Wide<T>(n) : Wide<T>(0);
            const Wide<T> square = sums[centred ? 2 * row + 1 : row] / Wide<T>(n);
            const Wide<T> variance = square - average * average;
            if (centred) mean[row] = Compute<T>(average);
            inverse[row] = Compute<T>(Wide<T>(1) / root((variance < 0 ? Wide<T>(0) : variance) + Wide<T>(epsilon)));
        }
    });
}

// Forward, phase 2: y = γ·(x − mean)/σ + β, or γ·x/rms.
template <class T, bool centred> struct Normalise {
    static constexpr int N = LANES<T>;
    const T *x, *gamma, *beta;
    const Compute<T>*mean, *inverse;
    T* y;
    int64 stride, columns;
    Compute<T> g[N], b[N];

    SUMMA3D_FUNCTION void begin(Place at) {
        load(g, gamma + at.column, at.count);
        load(b, beta + at.column, centred ? at.count : 0);
    }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        const Compute<T> centre = centred ? mean[row] : Compute<T>(0), scale = inverse[row];
        Compute<T> v[N];
        load(v, x + row * stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) v[i] = (v[i] - centre) * scale * g[i] + b[i];
        store(y + row * columns + at.column, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place) {}
};

// Backward, phase 1: Σgγ (centred only) and Σgγ·x̂ of each row.
template <class T, bool centred, class Block>
SUMMA3D_FUNCTION void norm_gradient_sums(
    Block& block, const T* gradient, const T* x, const T* gamma, const Compute<T>* mean, const Compute<T>* inverse,
    Compute<T>* sums, int64 gradient_stride, int64 stride, int64 rows, int64 columns) {
    constexpr int N = LANES<T>, TERMS = centred ? 2 : 1;
    typedef Values<TERMS, Compute<T>> Terms;
    for (int64 row = block.index(); row < rows; row += block.count()) {
        const Compute<T> centre = centred ? mean[row] : Compute<T>(0), scale = inverse[row];
        typename Block::template Each<Terms> terms(block);
        block.each([&](int thread) { terms[thread] = Terms{}; });
        walk_row<N>(block, x + row * stride, columns, [&](int thread, int64 column, int count) {
            Compute<T> v[N], g[N], w[N];
            load(v, x + row * stride + column, count);
            load(g, gradient + row * gradient_stride + column, count);
            load(w, gamma + column, count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) {
                const Compute<T> weighted = g[i] * w[i];
                if (centred) terms[thread].at[0] += weighted;
                terms[thread].at[TERMS - 1] += weighted * (v[i] - centre) * scale;
            }
        });
        const Terms all = block.template combine<Add>(terms, Compute<T>(0));
        block.each([&](int thread) {
            if (thread < TERMS) sums[row * TERMS + thread] = thread ? all.at[TERMS - 1] : all.at[0];
        });
    }
}

// Backward, phase 2: dx = (gγ − Σgγ/n − x̂·Σ(gγ·x̂)/n)/σ with sums over whole rows of n elements; and each lane's partial sums of
// the gradients of γ, Σg·x̂, and (centred) of β, Σg.
template <class T, bool centred> struct NormGradient {
    static constexpr int N = LANES<T>;
    const T *gradient, *x, *gamma;
    const Compute<T>*mean, *inverse, *sums;
    T* x_gradient;
    Compute<T>* parts;  // [1 or 2, lanes, columns]
    int64 gradient_stride, stride, columns, lanes;
    Compute<T> part;  // 1/n
    Compute<T> w[N], of_gamma[N], of_beta[N];

    SUMMA3D_FUNCTION void begin(Place at) {
        load(w, gamma + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) of_gamma[i] = of_beta[i] = 0;
    }

    SUMMA3D_FUNCTION void row(Place at, int64 row) {
        const Compute<T> centre = centred ? mean[row] : Compute<T>(0), scale = inverse[row];
        const Compute<T> plain = centred ? sums[2 * row] * part : Compute<T>(0);
        const Compute<T> along = sums[centred ? 2 * row + 1 : row] * part;
        Compute<T> v[N], g[N];
        load(v, x + row * stride + at.column, at.count);
        load(g, gradient + row * gradient_stride + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            const Compute<T> normal = (v[i] - centre) * scale;
            of_gamma[i] += g[i] * normal;
            of_beta[i] += g[i];
            v[i] = (g[i] * w[i] - plain - normal * along) * scale;
        }
        store(x_gradient + row * columns + at.column, v, at.count);
    }

    SUMMA3D_FUNCTION void end(Place at) {
        store(parts + at.lane * columns + at.column, of_gamma, at.count);
        if (centred) store(parts + (lanes + at.lane) * columns + at.column, of_beta, at.count);
    }
};

#define MAKE(T, name, centred, dtype) \
    SUMMA3D_KERNEL( \
        name##_norm_sums_##dtype, (norm_sums<T, centred>(block, x, sums, stride, rows, columns)), const T* x, Wide<T>* sums, \
        int64 stride, int64 rows, int64 columns) \
    SUMMA3D_KERNEL( \
        name##_norm_statistics_##dtype, (norm_statistics<T, centred>(block, sums, mean, inverse, n, epsilon, rows)), \
        const Wide<T>* sums, Compute<T>* mean, Compute<T>* inverse, double n, double epsilon, int64 rows) \
    SUMMA3D_KERNEL( \
        name##_norm_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    Normalise<T, centred>{x, gamma, beta, mean, inverse, y, stride, columns, {}, {}})), \
        const T* x, const T* gamma, const T* beta, const Compute<T>* mean, const Compute<T>* inverse, T* y, int64 stride, \
        int64 rows, int64 columns, int64 lanes, int64 across) \
    SUMMA3D_KERNEL( \
        name##_norm_gradient_sums_##dtype, \
        (norm_gradient_sums<T, centred>( \
            block, gradient, x, gamma, mean, inverse, sums, gradient_stride, stride, rows, columns)), \
        const T* gradient, const T* x, const T* gamma, const Compute<T>* mean, const Compute<T>* inverse, Compute<T>* sums, \
        int64 gradient_stride, int64 stride, int64 rows, int64 columns) \
    SUMMA3D_KERNEL( \
        name##_norm_gradient_##dtype, \
        (walk_tiles(block, Tiles{rows, columns, lanes, across}, \
                    NormGradient<T, centred>{ \
                        gradient, x, gamma, mean, inverse, sums, x_gradient, parts, gradient_stride, stride, columns, lanes, \
                        Compute<T>(1 / n), {}, {}, {}})), \
        const T* gradient, const T* x, const T* gamma, const Compute<T>* mean, const Compute<T>* inverse, \
        const Compute<T>* sums, T* x_gradient, Compute<T>* parts, double n, int64 gradient_stride, int64 stride, int64 rows, \
        int64 columns, int64 lanes, int64 across)
#define MAKE_BOTH(T, dtype) MAKE(T, layer, true, dtype) MAKE(T, rms, false, dtype)
SUMMA3D_FOR_EACH_DTYPE(MAKE_BOTH)
