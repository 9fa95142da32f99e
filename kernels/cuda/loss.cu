// Cross entropy over rows of logits whose columns a grid axis may split; this rank holds the columns first … first + columns.
// Three phases, with an all-reduce after each of the first two: the maximum of a row; its sum of exponentials and its label's
// logit; the gradient, which may overwrite the logits. The softmax is never stored.
#include "arithmetic.cuh"
#include "walk.cuh"

template <class T, class Block>
SUMMA3D_FUNCTION void row_maximum(Block& block, const T* logits, Compute<T>* maximum, int64 stride, int64 rows, int64 columns) {
    constexpr int N = LANES<T>;
    typedef Values<1, Compute<T>> One;
    for (int64 row = block.index(); row < rows; row += block.count()) {
        typename Block::template Each<One> most(block);
        block.each([&](int thread) { most[thread].at[0] = Compute<T>(-infinity()); });
        walk_row<N>(block, logits + row * stride, columns, [&](int thread, int64 column, int count) {
            Compute<T> v[N];
            load(v, logits + row * stride + column, count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) {
                if (i < count) most[thread].at[0] = Maximum()(v[i], most[thread].at[0]);
            }
        });
        const One all = block.template combine<Maximum>(most, Compute<T>(-infinity()));
        block.each([&](int thread) {
            if (thread == 0) maximum[row] = all.at[0];
        });
    }
}

// sums[row] = Σ exp(logit − maximum) over the local columns, and the label's logit − maximum (0 where the label is not local).
template <class T, class Block>
SUMMA3D_FUNCTION void cross_entropy_sums(
    Block& block, const T* logits, const Compute<T>* maximum, const int64* labels, Compute<T>* sums, int64 first, int64 stride,
    int64 rows, int64 columns) {
    constexpr int N = LANES<T>;
    constexpr bool fast = sizeof(T) == 2;
    typedef Values<1, Compute<T>> One;
    for (int64 row = block.index(); row < rows; row += block.count()) {
        const Compute<T> most = maximum[row];
        typename Block::template Each<One> sum(block);
        block.each([&](int thread) { sum[thread].at[0] = 0; });
        walk_row<N>(block, logits + row * stride, columns, [&](int thread, int64 column, int count) {
            Compute<T> v[N];
            load(v, logits + row * stride + column, count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) {
                if (i < count) sum[thread].at[0] += exponential<fast>(v[i] - most);
            }
        });
        const One all = block.template combine<Add>(sum, Compute<T>(0));
        block.each([&](int thread) {
            const int64 column = labels[row] - first;
            if (thread == 0) sums[2 * row] = all.at[0];
            if (thread == 1)
                sums[2 * row + 1] =
                    column >= 0 && column < columns ? widen(logits[row * stride + column]) - most : Compute<T>(0);
        });
    }
}

// gradient = (softmax − onehot)·scale, with softmax = exp(logit − maximum)/total.
template <class T, class Block>
SUMMA3D_FUNCTION void cross_entropy_gradient(
    Block& block, const T* logits, const Compute<T>* maximum, const Compute<T>* total, const int64* labels,
    const Compute<T>* scale, T* gradient, int64 first, int64 stride, int64 rows, int64 columns) {
    constexpr int N = LANES<T>;
    constexpr bool fast = sizeof(T) == 2;
    for (int64 row = block.index(); row < rows; row += block.count()) {
        const Compute<T> most = maximum[row], by = scale[row], inverse = Compute<T>(1) / total[row];
        const int64 label = labels[row] - first;  // negative where the row has no label: it equals no column
        walk_row<N>(block, logits + row * stride, columns, [&](int, int64 column, int count) {
            Compute<T> v[N];
            load(v, logits + row * stride + column, count);
            SUMMA3D_UNROLL
            for (int i = 0; i < N; ++i) v[i] = (exponential<fast>(v[i] - most) * inverse - (column + i == label)) * by;
            store(gradient + row * columns + column, v, count);
        });
    }
}

#define MAKE(T, dtype) \
    SUMMA3D_KERNEL( \
        row_maximum_##dtype, (row_maximum<T>(block, logits, maximum, stride, rows, columns)), const T* logits, \
        Compute<T>* maximum, int64 stride, int64 rows, int64 columns) \
    SUMMA3D_KERNEL( \
        cross_entropy_sums_##dtype, \
        (cross_entropy_sums<T>(block, logits, maximum, labels, sums, first, stride, rows, columns)), const T* logits, \
        const Compute<T>* maximum, const int64* labels, Compute<T>* sums, int64 first, int64 stride, int64 rows, int64 columns) \
    SUMMA3D_KERNEL( \
        cross_entropy_gradient_##dtype, \
        (cross_entropy_gradient<T>( \
            block, logits, maximum, total, labels, scale, gradient, first, stride, rows, columns)), \
        const T* logits, const Compute<T>* maximum, const Compute<T>* total, const int64* labels, const Compute<T>* scale, \
        T* gradient, int64 first, int64 stride, int64 rows, int64 columns)
SUMMA3D_FOR_EACH_DTYPE(MAKE)
