// Philox4x64-10, and the random numbers that the elements of a stream take from it: bitwise those of numpy and of
// summa3d/layout/random.py. Source: Salmon et al. 2011.
#pragma once
#include "common.cuh"

constexpr int NUMBERS = 8;  // 32-bit numbers of one counter

SUMMA3D_FUNCTION uint64 upper_half(uint64 a, uint64 b) {
#ifdef __CUDACC__
    return __umul64hi(a, b);
#else
    return uint64((unsigned __int128)a * b >> 64);
#endif
}

// The four 64-bit words of one counter (its upper three words are 0).
SUMMA3D_FUNCTION void philox(uint64 counter, uint64 key0, uint64 key1, uint64 (&words)[4]) {
    words[0] = counter;
    words[1] = words[2] = words[3] = 0;
    SUMMA3D_UNROLL
    for (int round = 0; round < 10; ++round) {
        const uint64 high0 = upper_half(0xD2E7470EE14C6C93ull, words[0]), low0 = 0xD2E7470EE14C6C93ull * words[0];
        const uint64 high1 = upper_half(0xCA5A826395121157ull, words[2]), low1 = 0xCA5A826395121157ull * words[2];
        words[0] = high1 ^ words[1] ^ key0;
        words[1] = low1;
        words[2] = high0 ^ words[3] ^ key1;
        words[3] = low0;
        key0 += 0x9E3779B97F4A7C15ull;
        key1 += 0xBB67AE8584CAA73Bull;
    }
}

// Bit i is 1 where number i of a counter is at least `threshold`.
SUMMA3D_FUNCTION uint32 kept_of(int64 counter, uint64 key0, uint64 key1, uint32 threshold) {
    uint64 words[4];
    philox(uint64(counter) + 1, key0, key1, words);
    uint32 kept = 0;
    SUMMA3D_UNROLL
    for (int i = 0; i < 4; ++i) {
        kept |= uint32((uint32)words[i] >= threshold) << (2 * i);
        kept |= uint32((uint32)(words[i] >> 32) >= threshold) << (2 * i + 1);
    }
    return kept;
}

// Bit i < 8 is 1 where element `first` + i of the stream is kept. Takes one counter where `first` is a multiple of 8, else two.
SUMMA3D_FUNCTION uint32 kept_from(int64 first, uint64 key0, uint64 key1, uint32 threshold) {
    const int skip = int(first % NUMBERS);
    uint32 kept = kept_of(first / NUMBERS, key0, key1, threshold) >> skip;
    if (skip) kept |= kept_of(first / NUMBERS + 1, key0, key1, threshold) << (NUMBERS - skip);
    return kept & 0xff;
}
