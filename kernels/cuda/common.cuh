// What every kernel shares: element types, their arithmetic types, conversions, and loads and stores of 16 bytes.
// Compiled by nvcc and NVRTC, and as C++ by a host compiler, which runs the same functions under test.
#pragma once

#ifdef __CUDACC__
#define SUMMA3D_FUNCTION __device__ __forceinline__
#define SUMMA3D_UNROLL _Pragma("unroll")
#define SUMMA3D_ROLLED _Pragma("unroll 1")
#else
#include <math.h>
#include <string.h>
#define SUMMA3D_FUNCTION inline
#define SUMMA3D_UNROLL
#define SUMMA3D_ROLLED
#endif

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;

constexpr int ACCESS = 16;  // bytes of the widest load and store

struct bfloat16 {
    unsigned short bits;
};
struct float16 {
    unsigned short bits;
};

// For an element type T: Compute, the type of its arithmetic; Wide, the type of its row sums (wide_dtype in reference.py); LANES,
// the elements of one 16-byte access.
template <class T> struct Of;
template <> struct Of<double> {
    typedef double Compute;
    typedef double Wide;
};
template <> struct Of<float> {
    typedef float Compute;
    typedef double Wide;
};
template <> struct Of<bfloat16> {
    typedef float Compute;
    typedef float Wide;
};
template <> struct Of<float16> {
    typedef float Compute;
    typedef float Wide;
};
template <class T> using Compute = typename Of<T>::Compute;
template <class T> using Wide = typename Of<T>::Wide;
template <class T> constexpr int LANES = ACCESS / int(sizeof(T));

// Each element type with the name that ends its kernels' names (suffix in launch.py).
#define SUMMA3D_FOR_EACH_DTYPE(MAKE) MAKE(double, float64) MAKE(float, float32) MAKE(bfloat16, bfloat16) MAKE(float16, float16)

SUMMA3D_FUNCTION uint32 bits_of(float value) {
#ifdef __CUDACC__
    return __float_as_uint(value);
#else
    uint32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

SUMMA3D_FUNCTION float float_of(uint32 bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

SUMMA3D_FUNCTION float infinity() { return float_of(0x7f800000); }

// -- 16-bit floats: round to nearest, ties to even; subnormals and NaN are preserved ------------------------------------------

SUMMA3D_FUNCTION double widen(double value) { return value; }
SUMMA3D_FUNCTION float widen(float value) { return value; }
SUMMA3D_FUNCTION float widen(bfloat16 value) { return float_of(uint32(value.bits) << 16); }

SUMMA3D_FUNCTION float widen(float16 value) {
#ifdef __CUDACC__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    float magnitude = float_of(uint32(value.bits & 0x7fff) << 13) * 0x1p112f;  // from float16's exponent bias to float's
    if (magnitude >= 0x1p16f) magnitude = float_of(bits_of(magnitude) | 0x7f800000);  // infinities and NaN
    return value.bits & 0x8000 ? -magnitude : magnitude;
#endif
}

SUMMA3D_FUNCTION void narrow(double value, double& out) { out = value; }
SUMMA3D_FUNCTION void narrow(float value, float& out) { out = value; }

SUMMA3D_FUNCTION void narrow(float value, bfloat16& out) {
    uint32 bits = bits_of(value);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    bits += 0x7fff + ((bits >> 16) & 1);
    out.bits = nan ? 0x7fc0 : (unsigned short)(bits >> 16);
}

SUMMA3D_FUNCTION void narrow(float value, float16& out) {
#ifdef __CUDACC__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
    const uint32 sign = bits_of(value) & 0x80000000;
    uint32 bits = bits_of(value) ^ sign;
    if (bits >= 0x47800000) {  // 2¹⁶ and above; 65520 … 2¹⁶ round up to infinity below
        bits = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (bits < 0x38800000) {  // below 2⁻¹⁴: the addition rounds at the last place of a subnormal
        bits = bits_of(float_of(bits) + 0.5f) - 0x3f000000;
    } else {
        bits = (bits + 0xc8000000u + 0xfff + ((bits >> 13) & 1)) >> 13;
    }
    out.bits = (unsigned short)(bits | sign >> 16);
#endif
}

// Rounds two values, with one instruction where the device has it.
template <class T> SUMMA3D_FUNCTION void narrow_pair(Compute<T> first, Compute<T> second, T* out) {
    narrow(first, out[0]);
    narrow(second, out[1]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> SUMMA3D_FUNCTION void narrow_pair<bfloat16>(float first, float second, bfloat16* out) {
    uint32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    out[0].bits = (unsigned short)both;
    out[1].bits = (unsigned short)(both >> 16);
}
#endif

// -- packs -------------------------------------------------------------------------------------------------------------------

// One 16-byte access; its address must be a multiple of 16.
template <class T> struct alignas(ACCESS) Chunk {
    T at[LANES<T>];
};

SUMMA3D_FUNCTION bool aligned(const void* address) { return ((uint64)address & (ACCESS - 1)) == 0; }

// Loads the first `count` of N elements, widened; sets the others to 0. Any alignment; 16-byte accesses where aligned.
template <int N, class T> SUMMA3D_FUNCTION void load(Compute<T> (&out)[N], const T* from, int count) {
    static_assert(N % LANES<T> == 0, "whole accesses");
    if (count == N && aligned(from)) {
        SUMMA3D_UNROLL
        for (int first = 0; first < N; first += LANES<T>) {
            const Chunk<T> chunk = *reinterpret_cast<const Chunk<T>*>(from + first);
            SUMMA3D_UNROLL
            for (int i = 0; i < LANES<T>; ++i) out[first + i] = widen(chunk.at[i]);
        }
    } else {
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) out[i] = i < count ? widen(from[i]) : Compute<T>(0);
    }
}

// Stores the first `count` of N values, rounded to T. Any alignment; 16-byte accesses where aligned.
template <int N, class T> SUMMA3D_FUNCTION void store(T* to, const Compute<T> (&values)[N], int count) {
    static_assert(N % LANES<T> == 0, "whole accesses");
    if (count == N && aligned(to)) {
        SUMMA3D_UNROLL
        for (int first = 0; first < N; first += LANES<T>) {
            Chunk<T> chunk;
            SUMMA3D_UNROLL
            for (int i = 0; i < LANES<T>; i += 2) narrow_pair<T>(values[first + i], values[first + i + 1], chunk.at + i);
            *reinterpret_cast<Chunk<T>*>(to + first) = chunk;
        }
    } else {
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            if (i < count) narrow(values[i], to[i]);
        }
    }
}

// a / b and a % b for a ≥ 0 and b > 0. The device's 64-bit division is a function call, which would spill registers; so numbers
// below 2³² are divided in 32 bits, and larger ones bit by bit.
struct Divided {
    int64 quotient, rest;
};
SUMMA3D_FUNCTION Divided divide(int64 a, int64 b) {
    if (((uint64)a | (uint64)b) >> 32 == 0) {
        const uint32 quotient = (uint32)a / (uint32)b;
        return {int64(quotient), int64((uint32)a - quotient * (uint32)b)};
    }
    Divided result = {0, 0};
    SUMMA3D_ROLLED
    for (int bit = 62; bit >= 0; --bit) {
        result.rest = result.rest << 1 | (a >> bit & 1);
        if (result.rest >= b) {
            result.rest -= b;
            result.quotient |= int64(1) << bit;
        }
    }
    return result;
}

SUMMA3D_FUNCTION int at_most(int64 value, int limit) { return value < limit ? int(value) : limit; }
