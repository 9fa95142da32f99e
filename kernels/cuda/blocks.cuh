// How the threads of a block run: DeviceBlock on a device; on a host HostBlock, its twin, which runs the threads one by one.
// A kernel is a sequence of phases, `block.each(…)`, with a barrier between two phases; a thread's values that outlive a phase
// are held in an Each. Only DeviceBlock uses what a host lacks: shuffles, shared memory, `__global__`.
#pragma once
#include "common.cuh"

enum : int {
    WARP = 32,
    MOST_THREADS = 256,
    LEAST_BLOCKS = 2,  // resident blocks per multiprocessor: at most 128 registers a thread, and no kernel spills
    SUMMED_ACROSS = 32  // columns that one block sums over lanes (columns.cu)
};

template <int N, class V> struct Values {
    V at[N];
};

struct Add {
    template <class V> SUMMA3D_FUNCTION V operator()(V a, V b) const { return a + b; }
};

struct Maximum {  // propagates NaN
    template <class V> SUMMA3D_FUNCTION V operator()(V a, V b) const { return a > b || a != a ? a : b; }
};

#ifdef __CUDACC__
struct DeviceBlock {
    // A thread's value that outlives a phase, in a register.
    template <class V> struct Each {
        V value;
        SUMMA3D_FUNCTION explicit Each(const DeviceBlock&) {}
        SUMMA3D_FUNCTION V& operator[](int) { return value; }
    };

    SUMMA3D_FUNCTION int64 index() const { return blockIdx.x; }
    SUMMA3D_FUNCTION int64 count() const { return gridDim.x; }
    SUMMA3D_FUNCTION int threads() const { return int(blockDim.x); }

    template <class Phase> SUMMA3D_FUNCTION void each(Phase phase) const { phase(int(threadIdx.x)); }

    // Block-wide reduction: combines every thread's values and returns the result to every thread. All threads must call it;
    // a block has whole warps.
    template <class Combine, int N, class V> SUMMA3D_FUNCTION Values<N, V> combine(Each<Values<N, V>>& each, V nothing) const {
        __shared__ V warps[N][WARP];
        const Combine both = Combine();
        const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
        Values<N, V> result;
        __syncthreads();  // every thread has read the values of the last call
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            V value = each.value.at[i];
            SUMMA3D_UNROLL
            for (int far = WARP / 2; far > 0; far /= 2) value = both(value, __shfl_xor_sync(0xffffffffu, value, far));
            if (lane == 0) warps[i][warp] = value;
        }
        __syncthreads();
        SUMMA3D_UNROLL
        for (int i = 0; i < N; ++i) {
            V value = lane < threads() / WARP ? warps[i][lane] : nothing;
            SUMMA3D_UNROLL
            for (int far = WARP / 2; far > 0; far /= 2) value = both(value, __shfl_xor_sync(0xffffffffu, value, far));
            result.at[i] = value;
        }
        return result;
    }

    // Leaves the sum of the values of threads t, t + across, t + 2·across, … in thread t, for t < across.
    template <class V> SUMMA3D_FUNCTION void sum_down(Each<V>& each, int across) const {
        __shared__ V values[MOST_THREADS];
        __syncthreads();
        values[threadIdx.x] = each.value;
        __syncthreads();
        if (int(threadIdx.x) < across) {
            V sum = 0;
            for (int other = int(threadIdx.x); other < threads(); other += across) sum += values[other];
            each.value = sum;
        }
    }
};

#define SUMMA3D_KERNEL(name, body, ...) \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS, LEAST_BLOCKS) name(__VA_ARGS__) { \
        DeviceBlock block; \
        body; \
    }
#else
struct HostBlock {
    template <class V> struct Each {
        V values[MOST_THREADS];
        explicit Each(const HostBlock&) {}
        V& operator[](int thread) { return values[thread]; }
    };

    int64 index_, count_;
    int threads_;

    int64 index() const { return index_; }
    int64 count() const { return count_; }
    int threads() const { return threads_; }

    template <class Phase> void each(Phase phase) const {
        for (int thread = 0; thread < threads_; ++thread) phase(thread);
    }

    // Reduces a warp in the order of the device's butterfly shuffles.
    template <class Combine, class V> static V combine_warp(const V* values) {
        V now[WARP], next[WARP];
        memcpy(now, values, sizeof now);
        for (int far = WARP / 2; far > 0; far /= 2) {
            for (int lane = 0; lane < WARP; ++lane) next[lane] = Combine()(now[lane], now[lane ^ far]);
            memcpy(now, next, sizeof now);
        }
        return now[0];
    }

    template <class Combine, int N, class V> Values<N, V> combine(Each<Values<N, V>>& each, V nothing) const {
        Values<N, V> result;
        for (int i = 0; i < N; ++i) {
            V warps[WARP], lanes[WARP];
            for (int warp = 0; warp < WARP; ++warp) {
                for (int lane = 0; lane < WARP && warp * WARP < threads_; ++lane) lanes[lane] = each[warp * WARP + lane].at[i];
                warps[warp] = warp * WARP < threads_ ? combine_warp<Combine>(lanes) : nothing;
            }
            result.at[i] = combine_warp<Combine>(warps);
        }
        return result;
    }

    template <class V> void sum_down(Each<V>& each, int across) const {
        for (int thread = 0; thread < across; ++thread) {
            V sum = 0;
            for (int other = thread; other < threads_; other += across) sum += each[other];
            each[thread] = sum;
        }
    }
};

#define SUMMA3D_KERNEL(name, body, ...) \
    extern "C" void name(int64 blocks_, int threads_, __VA_ARGS__) { \
        for (int64 index_ = 0; index_ < blocks_; ++index_) { \
            HostBlock block{index_, blocks_, threads_}; \
            body; \
        } \
    }
#endif
