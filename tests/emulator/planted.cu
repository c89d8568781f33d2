// Kernels with one planted bug each, to show what the emulator catches. BUG 0 is right.
#include "include/cuda.h"

// Sums of 256 consecutive numbers, one block of 256 threads each, written by every thread.
template <int BUG>
__global__ void block_sums(const float* x, i64 n, float* out) {
    __shared__ float parts[8];
    __shared__ float total[1];
    const int thread = (int)threadIdx.x;
    for (i64 at = (i64)blockIdx.x * 256; at < n; at += (i64)gridDim.x * 256) {
        const i64 i = at + thread;
        float sum = BUG == 1 || i < n ? x[i] : 0.0f;                          // reads beyond the end
        for (int half = BUG == 2 ? 8 : 16; half; half /= 2)                   // a step is missing
            sum += __shfl_xor_sync(BUG == 3 ? 0xffffu : kAllLanes, sum, half);  // half a warp
        if (BUG != 4 && thread % 32 == 0) parts[thread / 32] = sum;           // never written
        if (BUG != 5) __syncthreads();                                        // read before written
        if (thread == 0) {
            float all = 0.0f;
            for (int w = 0; w < 8; ++w) all += parts[w];
            total[0] = all;
            if (BUG == 6) __syncthreads();                                    // one thread alone
        }
        if (BUG != 7) __syncthreads();                                        // read before written
        if (BUG == 8 || i < n) out[i] = total[0];                             // writes beyond the end
    }
}

// Every lane's left neighbour, through shared memory.
template <int BUG>
__global__ void neighbours(const float* x, i64 n, float* out) {
    __shared__ float row[32];
    for (i64 at = 0; at < n; at += 32) {
        const int l = lane();
        if (BUG == 9 && l < 7) (void)__ballot_sync(kAllLanes, 1);            // not all lanes get here
        row[l] = x[at + l];
        if (BUG != 10) __syncwarp();
        out[at + l] = row[(l + 31) % 32];
        if (BUG != 11) __syncwarp();
    }
}

// Four numbers at once.
template <int BUG>
__global__ void copies(const float* x, i64 n, float* out) {
    struct alignas(16) Four { float v[4]; };
    const i64 i = (i64)threadIdx.x * 4 + (BUG == 12);                         // not a multiple of 16
    if (i + 4 <= n) *(Four*)(out + i) = *(const Four*)(x + i);
}
