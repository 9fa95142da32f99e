// The arithmetic of one element, in float or double: activations, rotations, the optimizer (reference: reference.py).
// `fast` selects the device's approximate exponential and quotient for 16-bit elements; their errors (a few 2⁻²²) are far below
// the rounding of a 16-bit element.
#pragma once
#include "common.cuh"

template <bool fast> SUMMA3D_FUNCTION float exponential(float x) {
#ifdef __CUDACC__
    if (fast) return __expf(x);
#endif
    return expf(x);
}
template <bool fast> SUMMA3D_FUNCTION double exponential(double x) { return exp(x); }

template <bool fast> SUMMA3D_FUNCTION float quotient(float a, float b) {
#ifdef __CUDACC__
    if (fast) return __fdividef(a, b);
#endif
    return a / b;
}
template <bool fast> SUMMA3D_FUNCTION double quotient(double a, double b) { return a / b; }

SUMMA3D_FUNCTION float error_function(float x) { return erff(x); }
SUMMA3D_FUNCTION double error_function(double x) { return erf(x); }
SUMMA3D_FUNCTION float root(float x) { return sqrtf(x); }
SUMMA3D_FUNCTION double root(double x) { return sqrt(x); }

template <bool fast, class C> SUMMA3D_FUNCTION C sigmoid(C x) { return quotient<fast>(C(1), C(1) + exponential<fast>(-x)); }

// GELU's tanh form: x/2·(1 + tanh u) = x·σ(2u), u = √(2/π)·(x + 0.044715·x³).
template <bool fast, class C> struct TanhGelu {
    static constexpr double TWICE = 1.5957691216057307117597842397375, CUBIC = 0.044715;  // 2·√(2/π)

    static SUMMA3D_FUNCTION C value(C x) { return x * sigmoid<fast>(C(TWICE) * (x + C(CUBIC) * x * x * x)); }

    static SUMMA3D_FUNCTION C slope(C x) {
        const C s = sigmoid<fast>(C(TWICE) * (x + C(CUBIC) * x * x * x));
        return s + x * s * (C(1) - s) * C(TWICE) * (C(1) + C(3 * CUBIC) * x * x);
    }
};

// GELU: x·Φ(x), with the slope Φ(x) + x·φ(x).
template <bool fast, class C> struct ExactGelu {
    static constexpr double ROOT_HALF = 0.70710678118654752440084436210485, DENSITY = 0.39894228040143267793994605993438;

    static SUMMA3D_FUNCTION C value(C x) { return x * C(0.5) * (C(1) + error_function(x * C(ROOT_HALF))); }

    static SUMMA3D_FUNCTION C slope(C x) {
        return C(0.5) * (C(1) + error_function(x * C(ROOT_HALF))) + x * C(DENSITY) * exponential<fast>(C(-0.5) * x * x);
    }
};

// Squared ReLU: max(0, x)², with the slope 2·max(0, x). A NaN stays one.
template <bool fast, class C> struct SquaredRelu {
    static SUMMA3D_FUNCTION C value(C x) { return x < C(0) ? C(0) : x * x; }

    static SUMMA3D_FUNCTION C slope(C x) { return x < C(0) ? C(0) : C(2) * x; }
};

// One element of AdamW, updated in place: weight, first and second moment; `gradient` is already unscaled and clipped.
template <class C> struct AdamW {
    C kept, beta1, beta2, epsilon, rate, root_correction;  // kept = 1 − rate·decay; rate divided by 1 − β1ᵗ; √(1 − β2ᵗ)

    SUMMA3D_FUNCTION void update(C& weight, C& first, C& second, C gradient) const {
        weight *= kept;
        first += (C(1) - beta1) * (gradient - first);
        second = beta2 * second + (C(1) - beta2) * gradient * gradient;
        weight -= rate * first / (root(second) / root_correction + epsilon);
    }
};
