// The recurrence over time on a GPU: diagonal_scan forwards, diagonal_rmatvec backwards. Free of
// torch. One thread runs one channel over one chunk of time; the chunks' starting states are found
// first, so that all of them run at once. See csrc/cpu/run.h for the directions.
#pragma once

// emulate.cpp runs the kernels on the host, with a launch of its own.
#ifndef CAPTUM_SSM_EMULATED
#include <cuda_runtime.h>
#define CAPTUM_SSM_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
#endif

#include <cstdint>

namespace captum_ssm {
namespace gpu {

constexpr int kChunk = 32;     // steps of one chunk
constexpr int kStates = 16;    // states that a thread keeps in registers
constexpr int kMaxTaps = 64;
constexpr int kThreads = 128;  // channels of one block
constexpr double kHugeStep = 1e30;

template <class T>
struct Maps {
  // Tensors of the whole batch, as in captum_ssm/kernels/; only the mean has columns.
  const T *dt, *right, *A, *B, *C, *left, *conv, *columns;
  int64_t batch, L, D, N, G, K;

  __host__ __device__ int64_t reach() const { return conv ? K - 1 : 0; }
  __host__ __device__ int64_t chunks() const { return (L + kChunk - 1) / kChunk; }
};

template <class T>
struct Run {
  Maps<T> maps;
  bool backward, shared;
  const T* input;  // (batch, L, D), or (batch, L) where shared
  T* output;       // (batch, L, D), or null
  T* partial;      // (blocks of channels, batch, L) sums over each block's channels, or null
  T* state;        // (batch, chunks, N, D): starting states; not used where there is one chunk
  T* elapsed;      // (batch, chunks, D): sums of the steps that lead to a chunk's start
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float exponential_minus_one(float x) { return expm1f(x); }
__device__ inline double exponential_minus_one(double x) { return expm1(x); }

// First step whose output is of a chunk. Both directions have the same chunks of positions, so the
// first chunk backwards may be shorter.
template <class T>
__device__ int64_t chunk_start(const Run<T>& r, int64_t c) {
  const Maps<T>& m = r.maps;
  if (r.backward) return c ? m.L - (m.chunks() - c) * kChunk : 0;
  return c < m.chunks() ? c * kChunk : m.L;
}

// First step of a chunk. Backwards with taps, a chunk begins `reach` steps early: its first outputs
// need those of the steps before them.
template <class T>
__device__ int64_t chunk_begin(const Run<T>& r, int64_t c) {
  const int64_t begin = chunk_start(r, c) - (r.backward ? r.maps.reach() : 0);
  return begin > 0 ? begin : 0;
}

// Up to kStates numbers from n0 on, zero beyond the last. No branch: all loads are under way at once.
template <class T>
__device__ void load_states(const T* from, int count, T (&to)[kStates]) {
#pragma unroll
  for (int n = 0; n < kStates; ++n) to[n] = n < count ? from[n] : T(0);
}

// Runs steps [first, last) for NB states from n0 on of channel d. emit(step, sum of the states read
// out) is called for every step. Returns the time elapsed.
template <class T, class Emit>
__device__ double run_steps(const Run<T>& r, int64_t b, int64_t d, int64_t n0, int64_t first,
                            int64_t last, T (&h)[kStates], const Emit& emit) {
  const Maps<T>& m = r.maps;
  const int64_t group = d / (m.D / m.G);
  const int count = int(m.N - n0 < kStates ? m.N - n0 : kStates);
  const T* before = r.backward ? m.left : m.right;
  T rate[kStates], write[kStates], read[kStates];
  load_states(m.A + d * m.N + n0, count, rate);
  double elapsed = 0;
  for (int64_t t = first; t < last; ++t) {
    const int64_t i = r.backward ? m.L - 1 - t : t, step = r.backward ? i + 1 : i;
    const int64_t at = ((b * m.L + i) * m.G + group) * m.N + n0;
    load_states((r.backward ? m.C : m.B) + at, count, write);
    load_states((r.backward ? m.B : m.C) + at, count, read);
    T dt = step < m.L ? m.dt[(b * m.L + step) * m.D + d] : T(0);
    dt = dt < T(kHugeStep) ? dt : T(kHugeStep);
    elapsed += dt;
    T in = r.shared ? r.input[b * m.L + i] : r.input[(b * m.L + i) * m.D + d];
    if (before) in *= before[(b * m.L + i) * m.D + d];
    T sum = 0;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      // A rounded decay, repeated, would drift.
      h[n] += h[n] * exponential_minus_one(rate[n] * dt) + write[n] * in;
      sum += read[n] * h[n];
    }
    emit(t, i, sum);
  }
  return elapsed;
}

// What each chunk but the last passes on, from a start at zero: blocks (channels, chunk, batch).
template <class T>
__global__ void chunk_states(Run<T> r) {
  const Maps<T>& m = r.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t c = blockIdx.y, b = blockIdx.z, chunks = m.chunks();
  if (d >= m.D) return;
  for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
    T h[kStates] = {};
    const double elapsed = run_steps(r, b, d, n0, chunk_begin(r, c), chunk_begin(r, c + 1), h,
                                     [](int64_t, int64_t, T) {});
#pragma unroll
    for (int n = 0; n < kStates; ++n)
      if (n0 + n < m.N) r.state[((b * chunks + c + 1) * m.N + n0 + n) * m.D + d] = h[n];
    r.elapsed[(b * chunks + c + 1) * m.D + d] = T(elapsed);
  }
}

// Makes what chunks pass on, at(1) and so on, into their starting states; exponent(c) is the log decay
// of a state between the starts of chunks c - 1 and c. Some chunks are loaded at once.
template <class T, class Exponent, class At>
__device__ void join_chunks(int64_t chunks, const Exponent& exponent, const At& at) {
  constexpr int kAtOnce = 8;
  T h = 0;
  at(0) = 0;
  for (int64_t c = 1; c < chunks; c += kAtOnce) {
    T entering[kAtOnce], lost[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t here = c + k < chunks ? c + k : chunks - 1;
      entering[k] = at(here), lost[k] = exponential_minus_one(exponent(here));
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (c + k < chunks) at(c + k) = h += h * lost[k] + entering[k];
  }
}

// Starting states one after the other: blocks (channels, states, batch).
template <class T>
__global__ void join_states(Run<T> r) {
  const Maps<T>& m = r.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t n = blockIdx.y, b = blockIdx.z, chunks = m.chunks();
  if (d >= m.D) return;
  const T rate = m.A[d * m.N + n];
  auto elapsed = [&](int64_t c) { return r.elapsed[(b * chunks + c) * m.D + d]; };
  auto at = [&](int64_t c) -> T& { return r.state[((b * chunks + c) * m.N + n) * m.D + d]; };
  join_chunks<T>(chunks, [&](int64_t c) { return rate * elapsed(c); }, at);
}

// The outputs: blocks (channels, chunk, batch).
template <class T>
__global__ void chunk_outputs(Run<T> r) {
  const Maps<T>& m = r.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t c = blockIdx.y, b = blockIdx.z, chunks = m.chunks();
  const int64_t first = chunk_begin(r, c), emitted = chunk_start(r, c), last = chunk_start(r, c + 1);
  const T* after = r.backward ? m.right : m.left;
  const int64_t taps = r.backward && m.conv ? m.K : 0;

  T sums[kChunk];  // of all states, step by step; in local memory
  for (int k = 0; k < kChunk; ++k) sums[k] = 0;
  T early[kMaxTaps];  // the same for the steps before the first emitted one
  for (int k = 0; k < kMaxTaps; ++k) early[k] = 0;
  if (d < m.D)
    for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
      T h[kStates] = {};
      if (chunks > 1) {
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          if (n0 + n < m.N) h[n] = r.state[((b * chunks + c) * m.N + n0 + n) * m.D + d];
      }
      run_steps(r, b, d, n0, first, last, h, [&](int64_t t, int64_t i, T sum) {
        if (after) sum *= after[(b * m.L + i) * m.D + d];
        if (t >= emitted)
          sums[t - emitted] += sum;
        else
          early[emitted - 1 - t] += sum;
      });
    }

  __shared__ T warps[kThreads / 32];
  for (int64_t t = emitted; t < last; ++t) {
    const int64_t i = r.backward ? m.L - 1 - t : t;
    T y = 0;
    if (d < m.D) {
      if (!taps) y = sums[t - emitted];
      // Backwards, the output of position i + q is that of step t - q.
      for (int64_t q = 0; q < taps; ++q) {
        const int64_t k = t - q - emitted;
        y += m.conv[d * m.K + m.K - 1 - q] * (k >= 0 ? sums[k] : early[-1 - k]);
      }
      if (r.output) r.output[(b * m.L + i) * m.D + d] = y;
    }
    if (r.partial) {
      for (int s = 16; s; s /= 2) y += __shfl_down_sync(0xffffffffu, y, s);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = y;
      __syncthreads();
      if (threadIdx.x == 0) {
        T sum = 0;
        for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
        r.partial[(blockIdx.x * m.batch + b) * m.L + i] = sum;
      }
      __syncthreads();
    }
  }
}

// mean[k] = the sum of the partial sums, over D.
template <class T>
__global__ void sum_partial(const T* partial, int64_t blocks, int64_t count, T scale, T* mean) {
  const int64_t k = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (k >= count) return;
  T sum = 0;
  for (int64_t x = 0; x < blocks; ++x) sum += partial[x * count + k];
  mean[k] = sum * scale;
}

inline int64_t channel_blocks(int64_t count) { return (count + kThreads - 1) / kThreads; }

// The chunks' starting states.
template <class T>
void find_starts(const Run<T>& r, cudaStream_t stream) {
  const Maps<T>& m = r.maps;
  const unsigned blocks = unsigned(channel_blocks(m.D)), chunks = unsigned(m.chunks());
  const unsigned batch = unsigned(m.batch);
  if (chunks == 1) return;
  CAPTUM_SSM_LAUNCH(chunk_states<T>, dim3(blocks, chunks - 1, batch), kThreads, stream, r);
  CAPTUM_SSM_LAUNCH(join_states<T>, dim3(blocks, unsigned(m.N), batch), kThreads, stream, r);
}

// state and elapsed may be null where there is one chunk; mean (batch, L) needs partial.
template <class T>
cudaError_t run(const Run<T>& r, T* mean, cudaStream_t stream) {
  const Maps<T>& m = r.maps;
  const unsigned blocks = unsigned(channel_blocks(m.D)), chunks = unsigned(m.chunks());
  const unsigned batch = unsigned(m.batch);
  find_starts(r, stream);
  CAPTUM_SSM_LAUNCH(chunk_outputs<T>, dim3(blocks, chunks, batch), kThreads, stream, r);
  if (mean) {
    const int64_t count = m.batch * m.L;
    CAPTUM_SSM_LAUNCH(sum_partial<T>, unsigned(channel_blocks(count)), kThreads, stream, r.partial,
                      blocks, count, T(1) / T(m.D), mean);
  }
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
