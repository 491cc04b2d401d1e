// The gradients of diagonal_scan on a GPU, see csrc/cpu/run_gradient.h for the equations. Free of
// torch. One thread runs one channel of one sequence: forwards, keeping its states at the start of
// each stretch, then from the last stretch to the first. Sums over channels and sequences are
// atomic, so their last digits depend on the order.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kGradientSteps = 16;  // of a stretch

template <class T>
struct Gradient {
  Maps<T> maps;     // without a convolution
  const T* v;       // (batch, L, D)
  const T* output;  // (batch, L, D), the gradient of the output
  // Zero at first; null where it is not wanted.
  T *of_v, *of_dt, *of_right;  // (batch, L, D)
  T* of_A;                     // (D, N)
  T *of_B, *of_C;              // (batch, L, G, N)
  T* of_left;                  // (batch, L, D)
  T* checkpoints;              // (batch, stretches, kStates, D)

  __host__ __device__ int64_t stretches() const {
    return (maps.L + kGradientSteps - 1) / kGradientSteps;
  }
};

template <class T>
__device__ void add_to(T* to, int64_t at, T value) {
  if (to) to[at] += value;
}

// Blocks (channels, 1, batch).
template <class T>
__global__ void scan_gradient(Gradient<T> r) {
  const Maps<T>& m = r.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x, b = blockIdx.z;
  if (d >= m.D) return;
  const int64_t group = d / (m.D / m.G), stretches = r.stretches();
  auto token = [&](int64_t t) { return (b * m.L + t) * m.D + d; };
  auto key = [&](int64_t t, int64_t n) { return ((b * m.L + t) * m.G + group) * m.N + n; };
  auto step = [&](int64_t t) {
    const T dt = m.dt[token(t)];
    return dt < T(kHugeStep) ? dt : T(kHugeStep);
  };
  auto checkpoint = [&](int64_t stretch, int64_t n) -> T& {
    return r.checkpoints[((b * stretches + stretch) * kStates + n) * m.D + d];
  };
  for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
    const int count = int(m.N - n0 < kStates ? m.N - n0 : kStates);
    T rate[kStates], h[kStates], s[kStates], of_rate[kStates];
    for (int n = 0; n < count; ++n)
      rate[n] = m.A[d * m.N + n0 + n], h[n] = s[n] = of_rate[n] = 0;
    for (int64_t t = 0; t < m.L; ++t) {
      const T dt = step(t), x = r.v[token(t)] * m.right[token(t)];
      for (int n = 0; n < count; ++n) {
        if (t % kGradientSteps == 0) checkpoint(t / kGradientSteps, n) = h[n];
        h[n] = h[n] * exponential(rate[n] * dt) + m.B[key(t, n0 + n)] * x;
      }
    }
    for (int64_t stretch = stretches - 1; stretch >= 0; --stretch) {
      const int64_t first = stretch * kGradientSteps;
      const int64_t last = first + kGradientSteps < m.L ? first + kGradientSteps : m.L;
      T decay[kGradientSteps][kStates], decayed[kGradientSteps][kStates];
      for (int n = 0; n < count; ++n) h[n] = checkpoint(stretch, n);
      for (int64_t t = first; t < last; ++t) {
        const T dt = step(t), x = r.v[token(t)] * m.right[token(t)];
        const T g = r.output[token(t)] * (m.left ? m.left[token(t)] : T(1));
        T sum = 0;
        for (int n = 0; n < count; ++n) {
          decay[t - first][n] = exponential(rate[n] * dt);
          decayed[t - first][n] = h[n] * decay[t - first][n];
          h[n] = decayed[t - first][n] + m.B[key(t, n0 + n)] * x;
          if (r.of_C) atomicAdd(r.of_C + key(t, n0 + n), g * h[n]);
          sum += m.C[key(t, n0 + n)] * h[n];
        }
        add_to(r.of_left, token(t), r.output[token(t)] * sum);
      }
      for (int64_t t = last - 1; t >= first; --t) {
        const T dt = step(t), x = r.v[token(t)] * m.right[token(t)];
        const T g = r.output[token(t)] * (m.left ? m.left[token(t)] : T(1));
        T entry = 0, of_dt = 0;
        for (int n = 0; n < count; ++n) {
          s[n] += m.C[key(t, n0 + n)] * g;
          entry += m.B[key(t, n0 + n)] * s[n];
          if (r.of_B) atomicAdd(r.of_B + key(t, n0 + n), x * s[n]);
          const T of_exponent = s[n] * decayed[t - first][n];
          of_dt += of_exponent * rate[n];
          of_rate[n] += of_exponent * dt;
          s[n] *= decay[t - first][n];
        }
        add_to(r.of_v, token(t), entry * m.right[token(t)]);
        add_to(r.of_right, token(t), entry * r.v[token(t)]);
        add_to(r.of_dt, token(t), of_dt);
      }
    }
    if (r.of_A)
      for (int n = 0; n < count; ++n) atomicAdd(r.of_A + d * m.N + n0 + n, of_rate[n]);
  }
}

template <class T>
cudaError_t gradient(const Gradient<T>& r, cudaStream_t stream) {
  const dim3 blocks(unsigned(channel_blocks(r.maps.D)), 1, unsigned(r.maps.batch));
  CAPTUM_SSM_LAUNCH(scan_gradient<T>, blocks, kThreads, stream, r);
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
