// Recurrences on a matrix-valued state on a GPU: linear_scan forwards, linear_vecmat backwards.
// Free of torch. A few lanes of a warp share a column of one head's state and run it over one chunk of
// time; where nothing is erased, the chunks' starting states are found first, so that all of them
// run at once. See csrc/cpu/linear.h for the steps.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kHeadChunk = 128;  // steps of one chunk
constexpr int kMaxKeys = 1024;   // N
constexpr double kLowestLogDecay = -1e4;

// One row of contiguous numbers for each token and head; null where there is none.
template <class T>
struct Rows {
  const T* data;
  int64_t batch, token, head;  // elements from one to the next; 0 where they share a row

  __device__ const T* at(int64_t b, int64_t t, int64_t h) const {
    return data + b * batch + t * token + h * head;
  }
};

template <class T>
struct HeadsRun {
  Rows<T> query, key, log_decay, erase, probe, bonus;
  Rows<T> input;  // P
  bool per_key, backward;
  int64_t batch, L, H, N, P;
  T* output;   // (batch, L, H, P)
  T* state;    // (batch, H, P, chunks, N): starting states; not used where there is one chunk
  T* elapsed;  // (batch, H, P, chunks, N): sums of the log decays that lead to a chunk's start

  __host__ __device__ int64_t columns() const { return batch * H * P; }
  __host__ __device__ int64_t chunks() const {
    return erase.data ? 1 : (L + kHeadChunk - 1) / kHeadChunk;
  }
};

__device__ inline float exponential_minus_one(float x) { return expm1f(x); }
__device__ inline double exponential_minus_one(double x) { return expm1(x); }

// The sum over the lanes of a column, in each of them.
template <int lanes, class T>
__device__ T sum_of_lanes(T x) {
#pragma unroll
  for (int by = lanes / 2; by; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}

// A lane's place: states lane, lane + lanes, ... of one column of one head.
template <int lanes>
struct Place {
  int64_t column, b, h, p, lane;
  bool valid;  // lanes beyond the last column run along with it, and write nothing

  template <class T>
  __device__ explicit Place(const HeadsRun<T>& r) {
    column = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / lanes;
    lane = threadIdx.x % lanes;
    valid = column < r.columns();
    if (!valid) column = r.columns() - 1;
    p = column % r.P, h = column / r.P % r.H, b = column / r.P / r.H;
  }
};

// Runs steps [first, last); emit(position, output) is called for every step. Adds up the log decays
// where `elapsed`.
template <int lanes, int S, class T, class Emit>
__device__ void run_head(const HeadsRun<T>& r, const Place<lanes>& at, int64_t first, int64_t last,
                         T (&s)[S], double* elapsed, const Emit& emit) {
  const bool delta = r.erase.data, bonus = r.bonus.data;
  for (int64_t step = first; step < last; ++step) {
    const int64_t t = r.backward ? r.L - 1 - step : step;
    const T* q = r.query.at(at.b, t, at.h);
    const T* k = r.key.at(at.b, t, at.h);
    const T* a = r.log_decay.at(at.b, t, at.h);
    const T x = r.input.at(at.b, t, at.h)[at.p];
    // Forwards values enter by k, are read by q and found by r; backwards the other way round.
    const T* enter = r.backward ? q : k;
    const T* read = r.backward ? k : q;
    const T* find = delta ? (r.backward ? r.erase : r.probe).at(at.b, t, at.h) : nullptr;
    const T* take = delta ? (r.backward ? r.probe : r.erase).at(at.b, t, at.h) : nullptr;
    T y = 0, found = 0, m[S];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      m[i] = 0;
      if (n >= r.N) continue;
      T log_decay = a[r.per_key ? n : 0];
      log_decay = log_decay < T(kLowestLogDecay) ? T(kLowestLogDecay) : log_decay;
      if (elapsed) elapsed[i] += log_decay;
      m[i] = exponential_minus_one(log_decay);
      if (r.backward) {
        if (!bonus) s[i] += enter[n] * x;
        y += read[n] * s[i];
      } else {
        if (bonus) y += read[n] * s[i];
        s[i] += s[i] * m[i];
      }
      if (delta) found += find[n] * s[i];
    }
    if (delta) found = sum_of_lanes<lanes>(found);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      if (n >= r.N) continue;
      if (delta) s[i] -= take[n] * found;
      if (r.backward) {
        s[i] += s[i] * m[i];
        if (bonus) s[i] += enter[n] * x;
      } else {
        s[i] += enter[n] * x;
        if (!bonus) y += read[n] * s[i];
      }
    }
    y = sum_of_lanes<lanes>(y);
    emit(t, bonus ? y + *r.bonus.at(at.b, t, at.h) * x : y);
  }
}

// What each chunk but the last passes on, from a start at zero: blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_chunk_states(HeadsRun<T> r) {
  const Place<lanes> at(r);
  const int64_t c = blockIdx.y;
  T s[S] = {};
  double elapsed[S] = {};
  run_head(r, at, c * kHeadChunk, (c + 1) * kHeadChunk, s, elapsed, [](int64_t, T) {});
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int64_t n = i * lanes + at.lane, to = (at.column * r.chunks() + c + 1) * r.N + n;
    if (at.valid && n < r.N) r.state[to] = s[i], r.elapsed[to] = T(elapsed[i]);
  }
}

// Starting states one after the other: a thread for each column and state.
template <class T>
__global__ void join_head_states(HeadsRun<T> r) {
  const int64_t x = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (x >= r.columns() * r.N) return;
  const int64_t first = x / r.N * r.chunks() * r.N + x % r.N;
  T s = 0;
  r.state[first] = 0;
  for (int64_t c = 1; c < r.chunks(); ++c) {
    const int64_t to = first + c * r.N;
    s = s * exponential(r.elapsed[to]) + r.state[to];
    r.state[to] = s;
  }
}

// The outputs: blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_chunk_outputs(HeadsRun<T> r) {
  const Place<lanes> at(r);
  const int64_t c = blockIdx.y, chunks = r.chunks(), first = c * kHeadChunk;
  const int64_t last = c + 1 == chunks ? r.L : first + kHeadChunk;
  T s[S] = {};
  if (chunks > 1) {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      if (n < r.N) s[i] = r.state[(at.column * chunks + c) * r.N + n];
    }
  }
  run_head(r, at, first, last, s, static_cast<double*>(nullptr), [&](int64_t t, T y) {
    if (at.valid && at.lane == 0) r.output[((at.b * r.L + t) * r.H + at.h) * r.P + at.p] = y;
  });
}

template <class T, int lanes, int S>
cudaError_t run_heads(const HeadsRun<T>& r, cudaStream_t stream) {
  const unsigned blocks = unsigned((r.columns() * lanes + kThreads - 1) / kThreads);
  const unsigned chunks = unsigned(r.chunks());
  if (chunks > 1) {
    const unsigned states = unsigned((r.columns() * r.N + kThreads - 1) / kThreads);
    CAPTUM_SSM_LAUNCH((head_chunk_states<T, lanes, S>), dim3(blocks, chunks - 1), kThreads, stream,
                      r);
    CAPTUM_SSM_LAUNCH(join_head_states<T>, states, kThreads, stream, r);
  }
  CAPTUM_SSM_LAUNCH((head_chunk_outputs<T, lanes, S>), dim3(blocks, chunks), kThreads, stream, r);
  return cudaGetLastError();
}

// N is at most kMaxKeys; state and elapsed may be null where there is one chunk.
template <class T>
cudaError_t run(const HeadsRun<T>& r, cudaStream_t stream) {
  if (r.N <= 8 * 4) return run_heads<T, 8, 4>(r, stream);
  if (r.N <= 8 * 16) return run_heads<T, 8, 16>(r, stream);
  return run_heads<T, 32, kMaxKeys / 32>(r, stream);
}

}  // namespace gpu
}  // namespace captum_ssm
