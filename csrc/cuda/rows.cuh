// Rows of every channel's matrix on a GPU: diagonal_rows. Free of torch. A warp runs 32 rows of one
// channel backwards in time, one per lane: they differ only in where they enter. A stretch of
// positions is kept in shared memory, where its taps are put on, and written row by row.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kWarp = 32;  // rows of a block, and positions of a stretch

template <class T>
struct MatrixRows {
  Maps<T> maps;
  const int64_t* index;  // (batch, R)
  int64_t R;
  T* out;  // (batch, D, R, L)
};

// Blocks (rows of one channel, batch) of one warp.
template <class T>
__global__ void matrix_rows(MatrixRows<T> r) {
  const Maps<T>& m = r.maps;
  const int64_t blocks = (r.R + kWarp - 1) / kWarp;
  const int64_t d = blockIdx.x / blocks, r0 = blockIdx.x % blocks * kWarp, b = blockIdx.y;
  const int64_t group = d / (m.D / m.G), reach = m.reach();
  const int lane = threadIdx.x, count = int(r.R - r0 < kWarp ? r.R - r0 : kWarp);
  const int64_t row = lane < count ? r.index[b * r.R + r0 + lane] : -1;
  T* const out = r.out + ((b * m.D + d) * r.R + r0) * m.L;

  __shared__ T lost[kWarp][kStates], read[kWarp][kStates];
  __shared__ T plain[kWarp][kWarp + kMaxTaps + 1];  // row, position: without the convolution
  __shared__ int64_t latest[kWarp];
  latest[lane] = row;
  __syncthreads();
  int64_t last = -1;  // the latest row: nothing is later
  for (int x = 0; x < kWarp; ++x) last = latest[x] > last ? latest[x] : last;
  last = last < m.L ? last : m.L - 1;
  const int64_t stretches = last / kWarp + (last >= 0);
  for (int x = 0; x < count; ++x)
    for (int64_t j = stretches * kWarp + lane; j < m.L; j += kWarp) out[x * m.L + j] = 0;

  for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
    T h[kStates] = {};
    for (int x = 0; x < reach; ++x) plain[lane][kWarp + x] = 0;
    for (int64_t c = stretches - 1; c >= 0; --c) {
      const int64_t c0 = c * kWarp, mine = c0 + lane;
      // Each lane makes the coefficients of one position.
      const T dt = mine + 1 < m.L ? m.dt[(b * m.L + mine + 1) * m.D + d] : T(0);
      const T step = dt < T(kHugeStep) ? dt : T(kHugeStep);
      const T enter = mine < m.L ? m.right[(b * m.L + mine) * m.D + d] : T(0);
      for (int n = 0; n < kStates; ++n) {
        const bool there = n0 + n < m.N && mine < m.L;
        lost[lane][n] = exponential_minus_one(there ? m.A[d * m.N + n0 + n] * step : T(0));
        read[lane][n] = there ? enter * m.B[((b * m.L + mine) * m.G + group) * m.N + n0 + n] : T(0);
      }
      __syncthreads();
      for (int x = kWarp - 1; x >= 0; --x) {
        const bool enters = c0 + x == row;
        const int64_t at = b * m.L + c0 + x;
        const T left = enters && m.left ? m.left[at * m.D + d] : T(1);
        T y = 0;
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          h[n] += h[n] * lost[x][n];
          if (enters && n0 + n < m.N) h[n] = left * m.C[(at * m.G + group) * m.N + n0 + n];
          y += h[n] * read[x][n];
        }
        plain[lane][x] = y;
      }
      __syncthreads();
      for (int x = 0; x < count && mine < m.L; ++x) {
        T y = plain[x][lane];
        if (m.conv) {
          y = 0;
          for (int q = 0; q <= reach; ++q)
            y += m.conv[d * m.K + reach - q] * plain[x][lane + q];
        }
        T& to = out[x * m.L + mine];
        to = n0 ? to + y : y;
      }
      __syncthreads();
      // The first of these positions are what the next stretch's taps read.
      for (int x = int(reach) - 1; x >= 0; --x) plain[lane][kWarp + x] = plain[lane][x];
    }
  }
}

template <class T>
cudaError_t rows(const MatrixRows<T>& r, cudaStream_t stream) {
  const unsigned blocks = unsigned((r.R + kWarp - 1) / kWarp * r.maps.D);
  CAPTUM_SSM_LAUNCH(matrix_rows<T>, dim3(blocks, unsigned(r.maps.batch)), kWarp, stream, r);
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
