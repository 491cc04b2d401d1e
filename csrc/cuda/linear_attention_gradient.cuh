// The gradients of linear_attention_scan on a GPU. Free of torch. As forwards, a few lanes of a warp
// share a column of one head's state, and where nothing is erased all chunks of time run at once, from
// starting states of the recurrence and of the gradient that are found first. A chunk is run over time
// and keeps its state at the start of each stretch, then runs from the last stretch to the first. With
// S' the state that has decayed, S after the token, f what was found, and R the gradient of S,
//
//   of k = R v,  of v = R k,  of e = -f R,  z = -R e,  of r = z S',  R' = R + z r,
//   of log_decay = R' S',  R before the token = exp(log_decay) R'
//
// and a read adds g q to R, where its own gradient is g S. Sums over columns are atomic, so their
// last digits depend on the order.
#pragma once

#include "linear_attention.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kHeadGradientSteps = 32;  // of a stretch
static_assert(kHeadChunk % kHeadGradientSteps == 0);

template <class T>
struct HeadsGradient {
  HeadsRun<T> values;    // forwards: v, and the starting states of chunks
  HeadsRun<T> gradient;  // backwards: the gradient of the output
  // Contiguous, and zero at first; null where it is not wanted.
  T* of_v;                 // (batch, L, H, P)
  T *of_query, *of_key;    // (batch, L, H, N)
  T* of_log_decay;         // (batch, L, H, 1 or N)
  T *of_erase, *of_probe;  // (batch, L, H, N)
  T* of_bonus;             // (batch, L, H)
  T* checkpoints;          // (batch, H, P, stretches, N)

  __host__ __device__ int64_t stretches() const {
    return (values.heads.L + kHeadGradientSteps - 1) / kHeadGradientSteps;
  }
  int64_t states() const { return values.columns() * stretches() * values.heads.N; }
};

// Adds what the columns of a warp have for each key to one row of keys.
template <int lanes, int S, class T>
__device__ void add_keys(T* row, const Lane<lanes>& at, int N, bool one_row, T (&x)[S]) {
  bool adds = at.valid;
  if (one_row) {
#pragma unroll
    for (int i = 0; i < S; ++i)
#pragma unroll
      for (int by = lanes; by < 32; by *= 2) x[i] += __shfl_xor_sync(0xffffffffu, x[i], by);
    adds = adds && threadIdx.x % 32 < lanes;
  }
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int n = i * lanes + at.lane;
    if (adds && n < N) atomicAdd(row + n, x[i]);
  }
}

// Blocks (columns, chunk).
template <class T, int lanes, int S>
__global__ void head_gradient(HeadsGradient<T> r) {
  const Heads<T>& m = r.values.heads;
  const int N = int(m.N);
  const int64_t P = r.values.P, c = blockIdx.y, chunks = r.values.chunks();
  const Lane<lanes> at(m, P);
  const bool delta = m.erase.data, bonus = m.bonus.data;
  const bool one_row = lanes < 32 && P % (32 / lanes) == 0;  // then all columns of a warp are valid, or none
  const int64_t begin = r.values.start(c), end = r.values.start(c + 1);
  auto head = [&](int64_t t) { return (at.b * m.L + t) * m.H + at.h; };
  auto value = [&](int64_t t) { return r.values.input.at(at.b, t, at.h)[at.p]; };
  auto of_output = [&](int64_t t) { return r.gradient.input.at(at.b, t, at.h)[at.p]; };
  auto checkpoint = [&](int64_t stretch) {
    return r.checkpoints + (at.column * r.stretches() + stretch) * m.N;
  };
  // One token: the state goes on, `decayed` is the one before its write. Returns what was found.
  auto pass = [&](int64_t t, T(&s)[S], T* decayed) {
    T key[S], probe[S], erase[S], log_decay[S], lost[S];
    load_keys(at, m.key, t, N, key);
    if (delta) load_keys(at, m.probe, t, N, probe), load_keys(at, m.erase, t, N, erase);
    load_log_decays(at, m, t, log_decay);
    lost_by(log_decay, m.per_key, lost);
    const T v = value(t);
    T found = 0;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      s[i] += s[i] * lost[i];
      if (decayed) decayed[i] = s[i];
      if (delta) found += probe[i] * s[i];
    }
    if (delta) found = sum_of_lanes<lanes>(found);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (delta) s[i] -= erase[i] * found;
      s[i] += key[i] * v;
    }
    return found;
  };

  T s[S] = {}, of_s[S] = {};
  load_start(r.values, at, c, s);
  load_start(r.gradient, at, chunks - 1 - c, of_s);
  for (int64_t t = begin; t < end; ++t) {
    if (t % kHeadGradientSteps == 0 && at.valid) {
#pragma unroll
      for (int i = 0; i < S; ++i)
        if (i * lanes + at.lane < N)
          checkpoint(t / kHeadGradientSteps)[i * lanes + at.lane] = s[i];
    }
    pass(t, s, nullptr);
  }
  for (int64_t first = begin + (end - begin - 1) / kHeadGradientSteps * kHeadGradientSteps;
       first >= begin; first -= kHeadGradientSteps) {
    const int64_t last = first + kHeadGradientSteps < end ? first + kHeadGradientSteps : end;
    T decayed[kHeadGradientSteps][S], found[kHeadGradientSteps];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int n = i * lanes + at.lane;
      s[i] = at.valid && n < N ? checkpoint(first / kHeadGradientSteps)[n] : T(0);
    }
    for (int64_t t = first; t < last; ++t) {
      const T g = of_output(t);
      T of_query[S];
      if (!bonus) found[t - first] = pass(t, s, decayed[t - first]);
#pragma unroll
      for (int i = 0; i < S; ++i) of_query[i] = g * s[i];
      if (bonus) found[t - first] = pass(t, s, decayed[t - first]);
      if (r.of_query) add_keys(r.of_query + head(t) * m.N, at, N, one_row, of_query);
    }
    for (int64_t t = last - 1; t >= first; --t) {
      T query[S], key[S], probe[S], erase[S], log_decay[S], lost[S], of_keys[S];
      load_keys(at, m.query, t, N, query);
      load_keys(at, m.key, t, N, key);
      if (delta) load_keys(at, m.probe, t, N, probe), load_keys(at, m.erase, t, N, erase);
      load_log_decays(at, m, t, log_decay);
      lost_by(log_decay, m.per_key, lost);
      const T g = of_output(t), v = value(t);
      const T* const before = decayed[t - first];
      T of_v = 0, z = 0, of_head = 0;
#pragma unroll
      for (int i = 0; i < S; ++i) {
        if (!bonus) of_s[i] += query[i] * g;
        of_v += key[i] * of_s[i];
        if (delta) z -= erase[i] * of_s[i];
        of_keys[i] = of_s[i] * v;
      }
      if (r.of_key) add_keys(r.of_key + head(t) * m.N, at, N, one_row, of_keys);
      of_v = sum_of_lanes<lanes>(of_v);
      if (delta) {
        z = sum_of_lanes<lanes>(z);
#pragma unroll
        for (int i = 0; i < S; ++i) of_keys[i] = -of_s[i] * found[t - first];
        if (r.of_erase) add_keys(r.of_erase + head(t) * m.N, at, N, one_row, of_keys);
#pragma unroll
        for (int i = 0; i < S; ++i) of_keys[i] = z * before[i], of_s[i] += probe[i] * z;
        if (r.of_probe) add_keys(r.of_probe + head(t) * m.N, at, N, one_row, of_keys);
      }
#pragma unroll
      for (int i = 0; i < S; ++i) {
        // A decay that was raised to the lowest one has no gradient.
        of_keys[i] = log_decay[i] > T(kLowestLogDecay) ? of_s[i] * before[i] : T(0);
        of_head += of_keys[i];
        of_s[i] += of_s[i] * lost[i];
        if (bonus) of_s[i] += query[i] * g;
      }
      if (r.of_log_decay && m.per_key)
        add_keys(r.of_log_decay + head(t) * m.N, at, N, one_row, of_keys);
      of_head = sum_of_lanes<lanes>(of_head);
      if (!at.valid || at.lane) continue;
      if (r.of_v) r.of_v[head(t) * P + at.p] = bonus ? of_v + *m.bonus.at(at.b, t, at.h) * g : of_v;
      if (r.of_bonus) atomicAdd(r.of_bonus + head(t), g * v);
      if (r.of_log_decay && !m.per_key) atomicAdd(r.of_log_decay + head(t), of_head);
    }
  }
}

template <class T>
struct RunHeadGradient {
  const HeadsGradient<T>& r;
  cudaStream_t stream;

  template <int lanes, int S>
  cudaError_t run() const {
    find_head_starts<lanes, S>(r.values, stream);
    find_head_starts<lanes, S>(r.gradient, stream);
    const dim3 blocks(head_blocks(r.values.columns() * lanes), unsigned(r.values.chunks()));
    CAPTUM_SSM_LAUNCH((head_gradient<T, lanes, S>), blocks, kThreads, stream, r);
    return cudaGetLastError();
  }
};

// N is at most kMaxKeys.
template <class T>
cudaError_t gradient(const HeadsGradient<T>& r, cudaStream_t stream) {
  return for_states(r.values.heads.N, RunHeadGradient<T>{r, stream});
}

}  // namespace gpu
}  // namespace captum_ssm
