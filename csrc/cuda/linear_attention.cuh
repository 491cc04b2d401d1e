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
  // The first step of a chunk. Both directions have the same chunks of positions, so the first one
  // backwards may be shorter.
  __device__ int64_t start(int64_t c) const {
    if (backward) return c ? heads.L - (chunks() - c) * kHeadChunk : 0;
    return c < chunks() ? c * kHeadChunk : heads.L;
  }
  __host__ __device__ int64_t decays() const { return heads.per_key ? heads.N : 1; }
  int64_t states() const { return columns() * chunks() * heads.N; }
  int64_t sums() const { return heads.batch * heads.H * chunks() * decays(); }
};

// The sum over the lanes of a column, in each of them.
template <int lanes, class T>
__device__ T sum_of_lanes(T x) {
#pragma unroll
  for (int by = lanes / 2; by; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}

// What a lane computes: states lane, lane + lanes, ... of one column of one head.
template <int lanes>
struct Lane {
  int64_t column, b, h, p;
  int lane;
  bool valid;  // lanes beyond the last column run along with it, and write nothing

  template <class T>
  __device__ Lane(const Heads<T>& heads, int64_t columns) {
    const int64_t all = heads.batch * heads.H * columns;
    column = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / lanes;
    lane = threadIdx.x % lanes;
    valid = column < all;
    if (!valid) column = all - 1;
    p = column % columns, h = column / columns % heads.H, b = column / columns / heads.H;
  }
};

// A lane's part of one row of keys, zero beyond the last one. No branch: all loads are under way at
// once.
template <int lanes, int S, class T>
__device__ void load_keys(const Lane<lanes>& at, const Rows<T>& rows, int64_t t, int N,
                          T (&to)[S]) {
  const T* const row = rows.at(at.b, t, at.h);
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int n = i * lanes + at.lane;
    to[i] = n < N ? row[n] : T(0);
  }
}

// A lane's part of the log decays of one token, not below the lowest.
template <int lanes, int S, class T>
__device__ void load_log_decays(const Lane<lanes>& at, const Heads<T>& m, int64_t t, T (&to)[S]) {
  if (m.per_key) {
    load_keys(at, m.log_decay, t, int(m.N), to);
  } else {
    const T of_head = *m.log_decay.at(at.b, t, at.h);
#pragma unroll
    for (int i = 0; i < S; ++i) to[i] = of_head;
  }
#pragma unroll
  for (int i = 0; i < S; ++i)
    to[i] = to[i] < T(kLowestLogDecay) ? T(kLowestLogDecay) : to[i];
}

// What states lose in one token: exp(log decay) - 1.
template <int S, class T>
__device__ void lost_by(const T (&log_decay)[S], bool per_key, T (&lost)[S]) {
  lost[0] = exponential_minus_one(log_decay[0]);
#pragma unroll
  for (int i = 1; i < S; ++i) lost[i] = per_key ? exponential_minus_one(log_decay[i]) : lost[0];
}

// A lane's part of one token. Forwards values enter by k, are read by q, found by r, and what was
// found is taken by e; backwards the opposite.
template <int lanes, int S, class T>
struct Token {
  T enter[S], read[S], find[S], take[S], log_decay[S], x, bonus;

  template <class Input>
  __device__ void load(const Heads<T>& m, const Lane<lanes>& at, bool backward, int64_t t,
                       const Input& input) {
    const int N = int(m.N);
    load_keys(at, backward ? m.query : m.key, t, N, enter);
    load_keys(at, backward ? m.key : m.query, t, N, read);
    if (m.erase.data) {
      load_keys(at, backward ? m.erase : m.probe, t, N, find);
      load_keys(at, backward ? m.probe : m.erase, t, N, take);
    }
    load_log_decays(at, m, t, log_decay);
    x = input(t);
    bonus = m.bonus.data ? *m.bonus.at(at.b, t, at.h) : T(0);
  }
};

// Runs steps [first, last): input(position) is what enters, emit(position, output) is called for
// every step. Adds up the log decays where `elapsed`.
template <int lanes, int S, class T, class Input, class Emit>
__device__ void run_head(const Heads<T>& m, const Lane<lanes>& at, bool backward, int64_t first,
                         int64_t last, T (&s)[S], double* elapsed, const Input& input,
                         const Emit& emit) {
  using One = Token<lanes, S, T>;
  const bool delta = m.erase.data, bonus = m.bonus.data;
  auto position = [&](int64_t step) { return backward ? m.L - 1 - step : step; };
  auto load = [&](int64_t step, One& to) {
    to.load(m, at, backward, position(step < last ? step : last - 1), input);
  };
  auto run = [&](int64_t step, const One& token) {
    T y = 0, found = 0, lost[S];
    lost_by(token.log_decay, m.per_key, lost);
    const bool at_once = backward && !bonus;  // what enters is read by this token
    const T early = at_once ? token.x : T(0), late = at_once ? T(0) : token.x;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (elapsed) elapsed[i] += token.log_decay[i];
      if (backward) {
        s[i] += token.enter[i] * early;
        y += token.read[i] * s[i];
      } else {
        y += bonus ? token.read[i] * s[i] : T(0);
        s[i] += s[i] * lost[i];
      }
      if (delta) found += token.find[i] * s[i];
    }
    if (delta) found = sum_of_lanes<lanes>(found);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (delta) s[i] -= token.take[i] * found;
      if (backward) s[i] += s[i] * lost[i];
      s[i] += token.enter[i] * late;
      if (!backward && !bonus) y += token.read[i] * s[i];
    }
    y = sum_of_lanes<lanes>(y);
    emit(position(step), bonus ? y + token.bonus * token.x : y);
  };
  // The next token is loaded while one is run, where registers hold both.
  if constexpr (S * sizeof(T) <= 64) {
    One even, odd;
    if (first < last) load(first, even);
    for (int64_t step = first; step < last; step += 2) {
      load(step + 1, odd);
      run(step, even);
      if (step + 1 == last) break;
      load(step + 2, even);
      run(step + 1, odd);
    }
  } else {
    One token;
    for (int64_t step = first; step < last; ++step) load(step, token), run(step, token);
  }
}

// Calls f.run<lanes, S>(), which has room for lanes * S states, with at least N of them.
template <class F>
cudaError_t for_states(int64_t N, const F& f) {
  if (N <= 8 * 4) return f.template run<8, 4>();
  if (N <= 8 * 8) return f.template run<8, 8>();
  if (N <= 8 * 16) return f.template run<8, 16>();
  if (N <= 32 * 16) return f.template run<32, 16>();
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
  const Lane<lanes> at(m, r.P);
  const int64_t c = blockIdx.y;
  T s[S] = {};
  double elapsed[S] = {};
  run_head(
      m, at, r.backward, r.start(c), r.start(c + 1), s, elapsed,
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
  const T* const elapsed = r.elapsed + head * r.chunks() * r.decays() + (r.heads.per_key ? n : 0);
  join_chunks<T>(
      r.chunks(), [&](int64_t c) { return elapsed[c * r.decays()]; },
      [&](int64_t c) -> T& { return state[c * N]; });
}

// The states that a chunk starts with; there are zeros in them for the only one.
template <int lanes, int S, class T>
__device__ void load_start(const HeadsRun<T>& r, const Lane<lanes>& at, int64_t c, T (&s)[S]) {
  if (r.chunks() == 1) return;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int64_t n = i * lanes + at.lane;
    if (n < r.heads.N) s[i] = r.state[(at.column * r.chunks() + c) * r.heads.N + n];
  }
}

// The outputs: blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_chunk_outputs(HeadsRun<T> r) {
  const Heads<T>& m = r.heads;
  const Lane<lanes> at(m, r.P);
  const int64_t c = blockIdx.y;
  T s[S] = {};
  load_start(r, at, c, s);
  run_head(
      m, at, r.backward, r.start(c), r.start(c + 1), s, static_cast<double*>(nullptr),
      [&](int64_t t) { return r.input.at(at.b, t, at.h)[at.p]; },
      [&](int64_t t, T y) {
        if (at.valid && at.lane == 0) r.output[((at.b * m.L + t) * m.H + at.h) * r.P + at.p] = y;
      });
}

// The chunks' starting states.
template <int lanes, int S, class T>
void find_head_starts(const HeadsRun<T>& r, cudaStream_t stream) {
  const unsigned blocks = head_blocks(r.columns() * lanes), chunks = unsigned(r.chunks());
  if (chunks == 1) return;
  CAPTUM_SSM_LAUNCH((head_chunk_states<T, lanes, S>), dim3(blocks, chunks - 1), kThreads, stream, r);
  CAPTUM_SSM_LAUNCH(join_head_states<T>, head_blocks(r.columns() * r.heads.N), kThreads, stream, r);
}

template <class T>
struct RunHeads {
  const HeadsRun<T>& r;
  cudaStream_t stream;

  template <int lanes, int S>
  cudaError_t run() const {
    const unsigned blocks = head_blocks(r.columns() * lanes), chunks = unsigned(r.chunks());
    find_head_starts<lanes, S>(r, stream);
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
  const Lane<lanes> at(m, r.R);
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
