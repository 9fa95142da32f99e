// AdamW in one pass: unscale and clip the gradient, update the moments and the float32 (float64) weights, and write the weights'
// 16-bit copies where there are any. G is the gradient's type, K the copy's.
#include "arithmetic.cuh"
#include "walk.cuh"

template <class G, class K> struct Update {
    typedef Compute<G> C;  // the type of weights and moments
    static constexpr int N = LANES<K>;
    C *weight, *first, *second;
    const G* gradient;
    K* copy;  // or null
    C factor;
    AdamW<C> rule;

    SUMMA3D_FUNCTION void begin(Place at) {
        C w[N], m[N], v[N], g[N];
        load(w, weight + at.column, at.count);
        load(m, first + at.column, at.count);
        load(v, second + at.column, at.count);
        load(g, gradient + at.column, at.count);
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) rule.update(w[i], m[i], v[i], g[i] * factor);
        store(weight + at.column, w, at.count);
        store(first + at.column, m, at.count);
        store(second + at.column, v, at.count);
        if (copy) store(copy + at.column, w, at.count);
    }

    SUMMA3D_FUNCTION void row(Place, int64) {}
    SUMMA3D_FUNCTION void end(Place) {}
};

#define MAKE(G, K, dtypes) \
    SUMMA3D_KERNEL( \
        adamw_##dtypes, \
        (walk_tiles(block, Tiles{1, columns, 1, block.threads()}, \
                    Update<G, K>{weight, first, second, gradient, copy, Compute<G>(factor), \
                                 {Compute<G>(kept), Compute<G>(beta1), Compute<G>(beta2), Compute<G>(epsilon), \
                                  Compute<G>(rate), Compute<G>(root_correction)}})), \
        Compute<G>* weight, Compute<G>* first, Compute<G>* second, const G* gradient, K* copy, double factor, double kept, \
        double beta1, double beta2, double epsilon, double rate, double root_correction, int64 columns)
MAKE(double, double, float64_float64)
MAKE(float, float, float32_float32)
MAKE(float, bfloat16, float32_bfloat16)
MAKE(float, float16, float32_float16)
MAKE(bfloat16, bfloat16, bfloat16_bfloat16)
MAKE(float16, float16, float16_float16)
