// The gradients of diagonal_scan on a GPU, see csrc/cpu/run_gradient.h for the equations. Free of
// torch. One thread runs one channel over one chunk of time, forwards from the chunk's starting states
// and then backwards from those of the gradient, both of which are found first. Sums over channels
// and sequences are atomic, so their last digits depend on the order.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

template <class T>
struct Gradient {
  Run<T> values;    // forwards: v, and the starting states of chunks, without a convolution
  Run<T> gradient;  // backwards: the gradient of the output
  // Zero at first; null where it is not wanted.
  T *of_v, *of_dt, *of_right;  // (batch, L, D)
  T* of_A;                     // (D, N)
  T *of_B, *of_C;              // (batch, L, G, N)
  T* of_left;                  // (batch, L, D)
};

template <class T>
__device__ void add_to(T* to, int64_t at, T value) {
  if (to) to[at] += value;
}

// Adds what each channel of a warp has for each state to one row of states.
template <class T>
__device__ void add_states(T* to, int count, T (&x)[kStates], bool one_row) {
  if (!one_row) {
#pragma unroll
    for (int n = 0; n < kStates; ++n)
      if (n < count) atomicAdd(to + n, x[n]);
    return;
  }
  // Half of the states go to half of the lanes, until two lanes hold one state.
  static_assert(kStates == 16);
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int some = kStates / 2; some; some /= 2) {
    const bool upper = lane & (2 * some);
#pragma unroll
    for (int n = 0; n < some; ++n) {
      const T given = upper ? x[n] : x[n + some];
      x[n] = (upper ? x[n + some] : x[n]) + __shfl_xor_sync(0xffffffffu, given, 2 * some);
    }
  }
  x[0] += __shfl_xor_sync(0xffffffffu, x[0], 1);
  if (lane % 2 == 0 && int(lane / 2) < count) atomicAdd(to + lane / 2, x[0]);
}

// Blocks (channels, chunk, batch).
template <class T>
__global__ void scan_gradient(Gradient<T> r) {
  const Maps<T>& m = r.values.maps;
  // Lanes beyond the last channel run along with it, and write nothing.
  int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const bool valid = d < m.D;
  if (!valid) d = m.D - 1;
  const int64_t c = blockIdx.y, b = blockIdx.z, chunks = m.chunks(), per_group = m.D / m.G;
  const int64_t group = d / per_group;
  const bool one_row = m.G == 1 || per_group % 32 == 0;
  const int64_t first = c * kChunk, last = first + kChunk < m.L ? first + kChunk : m.L;
  auto token = [&](int64_t t) { return (b * m.L + t) * m.D + d; };
  auto step = [&](int64_t t) {
    const T dt = m.dt[token(t)];
    return dt < T(kHugeStep) ? dt : T(kHugeStep);
  };
  auto enters = [&](int64_t t) { return r.values.input[token(t)] * m.right[token(t)]; };
  auto of_read = [&](int64_t t) {
    return r.gradient.input[token(t)] * (m.left ? m.left[token(t)] : T(1));
  };
  for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
    const int count = int(m.N - n0 < kStates ? m.N - n0 : kStates);
    auto keys = [&](int64_t t) { return ((b * m.L + t) * m.G + group) * m.N + n0; };
    T rate[kStates], h[kStates] = {}, s[kStates] = {}, of_rate[kStates] = {};
    T write[kStates], read[kStates], of_keys[kStates], decayed[kChunk][kStates];
    load_states(m.A + d * m.N + n0, count, rate);
    if (chunks > 1) {
      const T later = last < m.L ? step(last) : T(0);
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        if (n >= count) continue;
        h[n] = r.values.state[((b * chunks + c) * m.N + n0 + n) * m.D + d];
        s[n] = r.gradient.state[((b * chunks + chunks - 1 - c) * m.N + n0 + n) * m.D + d];
        s[n] += s[n] * exponential_minus_one(rate[n] * later);
      }
    }
    for (int64_t t = first; t < last; ++t) {
      load_states(m.B + keys(t), count, write);
      load_states(m.C + keys(t), count, read);
      const T dt = step(t), x = enters(t), g = of_read(t);
      T sum = 0;
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        h[n] += h[n] * exponential_minus_one(rate[n] * dt);
        decayed[t - first][n] = h[n];
        h[n] += write[n] * x;
        of_keys[n] = valid ? g * h[n] : T(0);
        sum += read[n] * h[n];
      }
      if (r.of_C) add_states(r.of_C + keys(t), count, of_keys, one_row);
      if (valid) add_to(r.of_left, token(t), r.gradient.input[token(t)] * sum);
    }
    for (int64_t t = last - 1; t >= first; --t) {
      load_states(m.B + keys(t), count, write);
      load_states(m.C + keys(t), count, read);
      const T dt = step(t), x = enters(t), g = of_read(t);
      T entry = 0, of_dt = 0;
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        s[n] += read[n] * g;
        entry += write[n] * s[n];
        of_keys[n] = valid ? x * s[n] : T(0);
        const T of_exponent = s[n] * decayed[t - first][n];
        of_dt += of_exponent * rate[n];
        of_rate[n] += of_exponent * dt;
        s[n] += s[n] * exponential_minus_one(rate[n] * dt);
      }
      if (r.of_B) add_states(r.of_B + keys(t), count, of_keys, one_row);
      if (!valid) continue;
      add_to(r.of_v, token(t), entry * m.right[token(t)]);
      add_to(r.of_right, token(t), entry * r.values.input[token(t)]);
      add_to(r.of_dt, token(t), of_dt);
    }
    if (r.of_A && valid)
      for (int n = 0; n < count; ++n) atomicAdd(r.of_A + d * m.N + n0 + n, of_rate[n]);
  }
}

template <class T>
cudaError_t gradient(const Gradient<T>& r, cudaStream_t stream) {
  const Maps<T>& m = r.values.maps;
  const dim3 blocks(unsigned(channel_blocks(m.D)), unsigned(m.chunks()), unsigned(m.batch));
  find_starts(r.values, stream);
  find_starts(r.gradient, stream);
  CAPTUM_SSM_LAUNCH(scan_gradient<T>, blocks, kThreads, stream, r);
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
