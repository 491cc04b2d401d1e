// The gradients of linear_attention_scan on a GPU. Free of torch. As forwards, a few lanes of a warp
// share a column of one head's state: they run it over time and keep it at the start of each
// stretch, then run from the last stretch to the first. With S' the state that has decayed, S after
// the token, f what was found, and R the gradient of S,
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

template <class T>
struct HeadsGradient {
  Heads<T> heads;
  int64_t P;
  Rows<T> v, output;  // P; the values, and the gradient of the output
  // Contiguous, and zero at first; null where it is not wanted.
  T* of_v;                 // (batch, L, H, P)
  T *of_query, *of_key;    // (batch, L, H, N)
  T* of_log_decay;         // (batch, L, H, 1 or N)
  T *of_erase, *of_probe;  // (batch, L, H, N)
  T* of_bonus;             // (batch, L, H)
  T* checkpoints;          // (batch, H, P, stretches, N)

  __host__ __device__ int64_t stretches() const {
    return (heads.L + kHeadGradientSteps - 1) / kHeadGradientSteps;
  }
  int64_t states() const { return heads.batch * heads.H * P * stretches() * heads.N; }
};

template <class T, int lanes, int S>
__global__ void head_gradient(HeadsGradient<T> r) {
  const Heads<T>& m = r.heads;
  const Place<lanes> at(m, r.P);
  const bool delta = m.erase.data, bonus = m.bonus.data;
  const int64_t stretches = r.stretches();
  auto each = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t n = i * lanes + at.lane;
      if (n < m.N) f(i, n);
    }
  };
  auto log_decay = [&](int64_t t, int64_t n) {
    return m.log_decay.at(at.b, t, at.h)[m.per_key ? n : 0];
  };
  auto lost = [&](int64_t t, int64_t n) {
    const T a = log_decay(t, n);
    return exponential_minus_one(a < T(kLowestLogDecay) ? T(kLowestLogDecay) : a);
  };
  auto token = [&](int64_t t, int64_t size) { return ((at.b * m.L + t) * m.H + at.h) * size; };
  // Lanes beyond the last column take part in sums over lanes, and write nothing.
  auto add = [&](T* to, int64_t t, int64_t n, T value) {
    if (to && at.valid) atomicAdd(to + token(t, m.N) + n, value);
  };
  // One token: the state goes on, `decayed` is the one before its write. Returns what was found.
  auto pass = [&](int64_t t, T(&s)[S], T* decayed) {
    const T v = r.v.at(at.b, t, at.h)[at.p];
    T found = 0;
    each([&](int i, int64_t n) {
      s[i] += s[i] * lost(t, n);
      if (decayed) decayed[i] = s[i];
      if (delta) found += m.probe.at(at.b, t, at.h)[n] * s[i];
    });
    if (delta) found = sum_of_lanes<lanes>(found);
    each([&](int i, int64_t n) {
      if (delta) s[i] -= m.erase.at(at.b, t, at.h)[n] * found;
      s[i] += m.key.at(at.b, t, at.h)[n] * v;
    });
    return found;
  };
  auto checkpoint = [&](int64_t stretch, int64_t n) -> T& {
    return r.checkpoints[(at.column * stretches + stretch) * m.N + n];
  };

  T s[S] = {}, of_s[S] = {};
  for (int64_t t = 0; t < m.L; ++t) {
    if (t % kHeadGradientSteps == 0 && at.valid)
      each([&](int i, int64_t n) { checkpoint(t / kHeadGradientSteps, n) = s[i]; });
    pass(t, s, nullptr);
  }
  for (int64_t stretch = stretches - 1; stretch >= 0; --stretch) {
    const int64_t first = stretch * kHeadGradientSteps;
    const int64_t last = first + kHeadGradientSteps < m.L ? first + kHeadGradientSteps : m.L;
    T decayed[kHeadGradientSteps][S], found[kHeadGradientSteps];
    each([&](int i, int64_t n) { s[i] = at.valid ? checkpoint(stretch, n) : T(0); });
    for (int64_t t = first; t < last; ++t) {
      const T g = r.output.at(at.b, t, at.h)[at.p];
      auto of_read = [&](int i, int64_t n) { add(r.of_query, t, n, g * s[i]); };
      if (bonus) each(of_read);
      found[t - first] = pass(t, s, decayed[t - first]);
      if (!bonus) each(of_read);
    }
    for (int64_t t = last - 1; t >= first; --t) {
      const T g = r.output.at(at.b, t, at.h)[at.p], v = r.v.at(at.b, t, at.h)[at.p];
      const T* const before = decayed[t - first];
      auto read = [&](int i, int64_t n) { of_s[i] += m.query.at(at.b, t, at.h)[n] * g; };
      if (!bonus) each(read);
      T of_v = 0, z = 0;
      each([&](int i, int64_t n) {
        of_v += m.key.at(at.b, t, at.h)[n] * of_s[i];
        add(r.of_key, t, n, of_s[i] * v);
        if (!delta) return;
        z -= m.erase.at(at.b, t, at.h)[n] * of_s[i];
        add(r.of_erase, t, n, -of_s[i] * found[t - first]);
      });
      of_v = sum_of_lanes<lanes>(of_v);
      if (delta) z = sum_of_lanes<lanes>(z);
      T of_head = 0;
      each([&](int i, int64_t n) {
        if (delta) {
          add(r.of_probe, t, n, z * before[i]);
          of_s[i] += m.probe.at(at.b, t, at.h)[n] * z;
        }
        // A decay that was raised to the lowest one has no gradient.
        const T of_decay = log_decay(t, n) < T(kLowestLogDecay) ? T(0) : of_s[i] * before[i];
        if (m.per_key)
          add(r.of_log_decay, t, n, of_decay);
        else
          of_head += of_decay;
        of_s[i] += of_s[i] * lost(t, n);
      });
      if (bonus) each(read);
      of_head = sum_of_lanes<lanes>(of_head);
      if (!at.valid || at.lane) continue;
      if (r.of_v)
        r.of_v[token(t, r.P) + at.p] = bonus ? of_v + *m.bonus.at(at.b, t, at.h) * g : of_v;
      if (r.of_bonus) atomicAdd(r.of_bonus + token(t, 1), g * v);
      if (r.of_log_decay && !m.per_key) atomicAdd(r.of_log_decay + token(t, 1), of_head);
    }
  }
}

template <class T>
struct RunHeadGradient {
  const HeadsGradient<T>& r;
  cudaStream_t stream;

  template <int lanes, int S>
  cudaError_t run() const {
    const int64_t columns = r.heads.batch * r.heads.H * r.P;
    CAPTUM_SSM_LAUNCH((head_gradient<T, lanes, S>), head_blocks(columns * lanes), kThreads, stream,
                      r);
    return cudaGetLastError();
  }
};

// N is at most kMaxKeys.
template <class T>
cudaError_t gradient(const HeadsGradient<T>& r, cudaStream_t stream) {
  return for_states(r.heads.N, RunHeadGradient<T>{r, stream});
}

}  // namespace gpu
}  // namespace captum_ssm
