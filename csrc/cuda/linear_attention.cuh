// Recurrences on a matrix-valued state on a GPU: linear_attention_scan forwards,
// linear_attention_rmatvec backwards, linear_attention_rows and linear_attention_mean backwards from
// unit vectors. Free of torch. A few lanes of a warp share a column of one head's state and run it
// over time; where the columns are values and nothing is erased, in chunks, whose starting states
// are found first, so that all of them run at once. See csrc/cpu/linear_attention.h for the steps.
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
struct Heads {
  Rows<T> query, key, log_decay, erase, probe, bonus;
  bool per_key;
  int64_t batch, L, H, N;
};

template <class T>
struct HeadsRun {
  Heads<T> heads;
  int64_t P;
  bool backward;
  Rows<T> input;  // P
  T* output;      // (batch, L, H, P)
  T* state;       // (batch, H, P, chunks, N): starting states; not used where there is one chunk
  T* elapsed;     // (batch, H, chunks, 1 or N): sums of the log decays that lead to a chunk's start

  __host__ __device__ int64_t columns() const { return heads.batch * heads.H * P; }
  __host__ __device__ int64_t chunks() const {
    return heads.erase.data ? 1 : (heads.L + kHeadChunk - 1) / kHeadChunk;
  }
  __host__ __device__ int64_t decays() const { return heads.per_key ? heads.N : 1; }
  int64_t states() const { return columns() * chunks() * heads.N; }
  int64_t sums() const { return heads.batch * heads.H * chunks() * decays(); }
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

// The part of a lane: states lane, lane + lanes, ... of one column of one head.
template <int lanes>
struct Place {
  int64_t column, b, h, p, lane;
  bool valid;  // lanes beyond the last column run along with it, and write nothing

  template <class T>
  __device__ Place(const Heads<T>& heads, int64_t columns) {
    const int64_t all = heads.batch * heads.H * columns;
    column = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / lanes;
    lane = threadIdx.x % lanes;
    valid = column < all;
    if (!valid) column = all - 1;
    p = column % columns, h = column / columns % heads.H, b = column / columns / heads.H;
  }
};

// Runs steps [first, last): input(position) is what enters, emit(position, output) is called for
// every step. Adds up the log decays where `elapsed`.
template <int lanes, int S, class T, class Input, class Emit>
__device__ void run_head(const Heads<T>& m, const Place<lanes>& at, bool backward, int64_t first,
                         int64_t last, T (&s)[S], double* elapsed, const Input& input,
                         const Emit& emit) {
  const bool delta = m.erase.data, bonus = m.bonus.data;
  for (int64_t step = first; step < last; ++step) {
    const int64_t t = backward ? m.L - 1 - step : step;
    const T* q = m.query.at(at.b, t, at.h);
    const T* k = m.key.at(at.b, t, at.h);
    const T* a = m.log_decay.at(at.b, t, at.h);
    const T x = input(t);
    // Forwards values enter by k, are read by q and found by r; backwards the opposite.
    const T* enter = backward ? q : k;
    const T* read = backward ? k : q;
    const T* find = delta ? (backward ? m.erase : m.probe).at(at.b, t, at.h) : nullptr;
    const T* take = delta ? (backward ? m.probe : m.erase).at(at.b, t, at.h) : nullptr;
    auto decay = [&](int64_t n) {
      return a[n] < T(kLowestLogDecay) ? T(kLowestLogDecay) : a[n];
    };
    const T of_head = decay(0), lost_by_head = exponential_minus_one(of_head);
    T y = 0, found = 0, lost[S];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      lost[i] = lost_by_head;
      if (n >= m.N) continue;
      const T log_decay = m.per_key ? decay(n) : of_head;
      if (m.per_key) lost[i] = exponential_minus_one(log_decay);
      if (elapsed) elapsed[i] += log_decay;
      if (backward) {
        if (!bonus) s[i] += enter[n] * x;
        y += read[n] * s[i];
      } else {
        if (bonus) y += read[n] * s[i];
        s[i] += s[i] * lost[i];
      }
      if (delta) found += find[n] * s[i];
    }
    if (delta) found = sum_of_lanes<lanes>(found);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      if (n >= m.N) continue;
      if (delta) s[i] -= take[n] * found;
      if (backward) {
        s[i] += s[i] * lost[i];
        if (bonus) s[i] += enter[n] * x;
      } else {
        s[i] += enter[n] * x;
        if (!bonus) y += read[n] * s[i];
      }
    }
    y = sum_of_lanes<lanes>(y);
    emit(t, bonus ? y + *m.bonus.at(at.b, t, at.h) * x : y);
  }
}

// Calls f.run<lanes, S>(), which has room for lanes * S states, with at least N of them.
template <class F>
cudaError_t for_states(int64_t N, const F& f) {
  if (N <= 8 * 4) return f.template run<8, 4>();
  if (N <= 8 * 16) return f.template run<8, 16>();
  return f.template run<32, kMaxKeys / 32>();
}

inline unsigned head_blocks(int64_t threads) {
  return unsigned((threads + kThreads - 1) / kThreads);
}

// ---- values ----------------------------------------------------------------------------------

// What each chunk but the last passes on, from a start at zero: blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_chunk_states(HeadsRun<T> r) {
  const Heads<T>& m = r.heads;
  const Place<lanes> at(m, r.P);
  const int64_t c = blockIdx.y;
  T s[S] = {};
  double elapsed[S] = {};
  run_head(
      m, at, r.backward, c * kHeadChunk, (c + 1) * kHeadChunk, s, elapsed,
      [&](int64_t t) { return r.input.at(at.b, t, at.h)[at.p]; }, [](int64_t, T) {});
  const int64_t head = at.b * m.H + at.h;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int64_t n = i * lanes + at.lane;
    if (!at.valid || n >= m.N) continue;
    r.state[(at.column * r.chunks() + c + 1) * m.N + n] = s[i];
    // The columns of a head have the same.
    if (at.p == 0 && n < r.decays())
      r.elapsed[(head * r.chunks() + c + 1) * r.decays() + n] = T(elapsed[i]);
  }
}

// Starting states one after the other: a thread for each column and state.
template <class T>
__global__ void join_head_states(HeadsRun<T> r) {
  const int64_t x = blockIdx.x * int64_t(kThreads) + threadIdx.x, N = r.heads.N;
  if (x >= r.columns() * N) return;
  const int64_t column = x / N, n = x % N, head = column / r.P;
  T* const state = r.state + column * r.chunks() * N + n;
  T s = state[0] = 0;
  for (int64_t c = 1; c < r.chunks(); ++c) {
    const T elapsed = r.elapsed[(head * r.chunks() + c) * r.decays() + (r.heads.per_key ? n : 0)];
    s = s * exponential(elapsed) + state[c * N];
    state[c * N] = s;
  }
}

// The outputs: blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_chunk_outputs(HeadsRun<T> r) {
  const Heads<T>& m = r.heads;
  const Place<lanes> at(m, r.P);
  const int64_t c = blockIdx.y, chunks = r.chunks(), first = c * kHeadChunk;
  const int64_t last = c + 1 == chunks ? m.L : first + kHeadChunk;
  T s[S] = {};
  if (chunks > 1) {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      if (n < m.N) s[i] = r.state[(at.column * chunks + c) * m.N + n];
    }
  }
  run_head(
      m, at, r.backward, first, last, s, static_cast<double*>(nullptr),
      [&](int64_t t) { return r.input.at(at.b, t, at.h)[at.p]; },
      [&](int64_t t, T y) {
        if (at.valid && at.lane == 0) r.output[((at.b * m.L + t) * m.H + at.h) * r.P + at.p] = y;
      });
}

template <class T>
struct RunHeads {
  const HeadsRun<T>& r;
  cudaStream_t stream;

  template <int lanes, int S>
  cudaError_t run() const {
    const unsigned blocks = head_blocks(r.columns() * lanes), chunks = unsigned(r.chunks());
    if (chunks > 1) {
      CAPTUM_SSM_LAUNCH((head_chunk_states<T, lanes, S>), dim3(blocks, chunks - 1), kThreads,
                        stream, r);
      CAPTUM_SSM_LAUNCH(join_head_states<T>, head_blocks(r.columns() * r.heads.N), kThreads, stream,
                        r);
    }
    CAPTUM_SSM_LAUNCH((head_chunk_outputs<T, lanes, S>), dim3(blocks, chunks), kThreads, stream, r);
    return cudaGetLastError();
  }
};

// N is at most kMaxKeys; state and elapsed may be null where there is one chunk.
template <class T>
cudaError_t run(const HeadsRun<T>& r, cudaStream_t stream) {
  return for_states(r.heads.N, RunHeads<T>{r, stream});
}

// ---- rows ------------------------------------------------------------------------------------

template <class T>
struct HeadRows {
  Heads<T> heads;
  int64_t R;
  const int64_t* index;  // (batch, R), or null for R rows from `start` on
  int64_t start;
  T* out;     // (batch, H, R, L); with `mean` (batch, R, L), zero at first
  bool mean;  // over heads

  __device__ int64_t row(int64_t b, int64_t p) const { return index ? index[b * R + p] : start + p; }
};

template <class T, int lanes, int S>
__global__ void head_rows(HeadRows<T> r) {
  const Heads<T>& m = r.heads;
  const Place<lanes> at(m, r.R);
  const int64_t row = r.row(at.b, at.p);
  // All lanes of a warp take the same steps: from the latest of its rows on.
  int64_t last = row;
#pragma unroll
  for (int by = 16; by >= lanes; by /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, last, by);
    last = other > last ? other : last;
  }
  last = last < m.L ? last : m.L - 1;
  T* const out = r.out + (r.mean ? at.b * r.R + at.p : at.column) * m.L;
  if (!r.mean && at.valid)
    for (int64_t t = last + 1 + at.lane; t < m.L; t += lanes) out[t] = 0;
  T s[S] = {};
  run_head(
      m, at, true, m.L - 1 - last, m.L, s, static_cast<double*>(nullptr),
      [&](int64_t t) { return T(t == row); },
      [&](int64_t t, T y) {
        if (!at.valid || at.lane) return;
        if (r.mean)
          atomicAdd(out + t, y / T(m.H));
        else
          out[t] = y;
      });
}

template <class T>
struct RunHeadRows {
  const HeadRows<T>& r;
  cudaStream_t stream;

  template <int lanes, int S>
  cudaError_t run() const {
    const int64_t columns = r.heads.batch * r.heads.H * r.R;
    CAPTUM_SSM_LAUNCH((head_rows<T, lanes, S>), head_blocks(columns * lanes), kThreads, stream, r);
    return cudaGetLastError();
  }
};

// N is at most kMaxKeys.
template <class T>
cudaError_t rows(const HeadRows<T>& r, cudaStream_t stream) {
  return for_states(r.heads.N, RunHeadRows<T>{r, stream});
}

}  // namespace gpu
}  // namespace captum_ssm
