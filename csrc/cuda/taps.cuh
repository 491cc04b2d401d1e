// Rows of maps times what each token contributes through each tap, on a GPU: tap_rows. Free of
// torch. See csrc/cpu/taps.h.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kTapRows = 8;  // rows of one thread, which share the values it reads

template <class T>
struct TapRows {
  const T *rows, *values, *left;  // (B, M, R, L), (K, B, D, L), (B, D, R) or null
  int64_t B, M, D, R, L, C, K;
  int64_t stride;  // elements of out from one sequence to the next
  T* out;          // (B, D, R, C)
};

// Blocks (columns of one channel, rows).
template <class T>
__global__ void rows_through_taps(TapRows<T> p) {
  const int64_t blocks = (p.C + kThreads - 1) / kThreads;
  const int64_t channel = blockIdx.x / blocks, b = channel / p.D, d = channel % p.D;
  const int64_t j = blockIdx.x % blocks * kThreads + threadIdx.x;
  if (j >= p.C) return;
  const int64_t taps = p.K < p.L - j ? p.K : p.L - j, first = blockIdx.y * int64_t(kTapRows);
  const T* row = p.rows + ((b * p.M + d / (p.D / p.M)) * p.R + first) * p.L + j;
  T sum[kTapRows] = {};
  for (int64_t k = 0; k < taps; ++k) {
    const T value = p.values[((k * p.B + b) * p.D + d) * p.L + j + k];
#pragma unroll
    for (int r = 0; r < kTapRows; ++r)
      if (first + r < p.R) sum[r] += row[r * p.L + k] * value;
  }
#pragma unroll
  for (int r = 0; r < kTapRows; ++r)
    if (first + r < p.R)
      p.out[b * p.stride + (d * p.R + first + r) * p.C + j] =
          p.left ? sum[r] * p.left[channel * p.R + first + r] : sum[r];
}

template <class T>
cudaError_t tap_rows(const TapRows<T>& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.B * p.D * ((p.C + kThreads - 1) / kThreads));
  const unsigned rows = unsigned((p.R + kTapRows - 1) / kTapRows);
  CAPTUM_SSM_LAUNCH(rows_through_taps<T>, dim3(blocks, rows), kThreads, stream, p);
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
