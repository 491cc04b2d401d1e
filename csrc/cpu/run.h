// The recurrence over time: diagonal_scan forwards, diagonal_rmatvec backwards. One vector holds
// one state of as many channels as there are lanes. No includes here (see vec.h).
//
// With i the position of a step, both directions are h <- decay h + write_i input_i and
// output_i = read_i . h, where forwards the input is v * right, written by B and read by C, and
// backwards it is w * left, written by C and read by B, decaying by the step after i.

// The positions of a stretch of a few steps are packed, padded and clamped once per block of
// channels, then all states run over it.
constexpr int64_t kRunSteps = 32;
constexpr double kHugeStep = 1e30;  // stands for an infinite step: any A < 0 times it underflows

template <class T>
struct RunTile {
  T dt[kRunSteps * lanes<T>];
  T input[kRunSteps * lanes<T>];
  T output[kRunSteps * lanes<T>];
};

template <class T>
INLINE T clamp_step(T x) {
  return x < T(kHugeStep) ? x : T(kHugeStep);
}

// Coefficients of a state: one number where the block of channels shares its group,
// otherwise a vector.
template <class T>
struct SharedCoefficients {
  const T* write;
  const T* read;
  int64_t step;  // elements from one step to the next, negative backwards
  INLINE Vec<T> written(int64_t t, int64_t n) const { return splat(write[t * step + n]); }
  INLINE Vec<T> readout(int64_t t, int64_t n) const { return splat(read[t * step + n]); }
};
template <class T>
struct OwnCoefficients {
  const T* write;  // (steps, N, lanes)
  const T* read;
  int64_t states;
  INLINE Vec<T> written(int64_t t, int64_t n) const {
    return load(write + (t * states + n) * lanes<T>);
  }
  INLINE Vec<T> readout(int64_t t, int64_t n) const {
    return load(read + (t * states + n) * lanes<T>);
  }
};

template <int NB, bool emit, class T, class Coefficients>
INLINE void run_states(RunTile<T>& tile, const Coefficients& c, const T* rate, T* state, int64_t n0,
                       int64_t steps) {
  constexpr int64_t W = lanes<T>;
  Vec<T> h[NB];
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) h[n] = load(state + (n0 + n) * W);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<T> dt = load(tile.dt + t * W), in = load(tile.input + t * W);
    Vec<T> sum[2] = {Vec<T>{}, Vec<T>{}};
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) {
      h[n] += h[n] * exp2m1v<T>(load(rate + (n0 + n) * W) * dt);
      h[n] += c.written(t, n0 + n) * in;
      if (emit) sum[n & 1] += c.readout(t, n0 + n) * h[n];
    }
    if (emit) store(tile.output + t * W, load(tile.output + t * W) + (sum[0] + sum[1]));
  }
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) store(state + (n0 + n) * W, h[n]);
}

template <bool emit, class T, class Coefficients>
NOINLINE void run_all_states(RunTile<T>& tile, const Coefficients& c, const T* rate, T* state,
                             int64_t states, int64_t steps) {
  int64_t n = 0;
  for (; n + kStateBlock <= states; n += kStateBlock)
    run_states<kStateBlock, emit>(tile, c, rate, state, n, steps);
  for (; n + 4 <= states; n += 4) run_states<4, emit>(tile, c, rate, state, n, steps);
  for (; n < states; ++n) run_states<1, emit>(tile, c, rate, state, n, steps);
}

template <class T>
static int64_t run_scratch(const Run<T>& run) {
  constexpr int64_t W = lanes<T>;
  const int64_t blocks = (run.d1 - run.d0 + W - 1) / W;
  const int64_t tile = sizeof(RunTile<T>) / sizeof(T);
  const int64_t rates = blocks * run.maps.N * W;
  const int64_t carry = blocks * run.maps.reach() * W;
  const int64_t taps = (run.maps.K + 1) * W;
  const int64_t window = (kRunSteps + run.maps.reach()) * W;
  return tile + rates + carry + taps + window + kRunSteps * W + 2 * kRunSteps * run.maps.N * W;
}

// lanes<T> numbers from a row of channels, zero beyond its end.
template <class T>
INLINE Vec<T> load_part(const T* p, int64_t count) {
  if (count >= lanes<T>) return load(p);
  Vec<T> v{};
  for (int64_t k = 0; k < count; ++k) v[k] = p[k];
  return v;
}
template <class T>
INLINE void store_part(T* p, Vec<T> v, int64_t count) {
  if (count >= lanes<T>) {
    store(p, v);
    return;
  }
  for (int64_t k = 0; k < count; ++k) p[k] = v[k];
}

// The coefficients of `steps` positions from `begin` on for each of `count` channels: (steps, N,
// lanes), for OwnCoefficients.
template <class T>
static void own_coefficients(const Maps<T>& m, int64_t d, int64_t count, int64_t begin, int64_t way,
                             int64_t steps, const T* from, T* own) {
  constexpr int64_t W = lanes<T>;
  for (int64_t t = 0; t < steps; ++t)
    for (int64_t x = 0; x < W; ++x) {
      const int64_t at = ((begin + way * t) * m.G + m.group(x < count ? d + x : d)) * m.N;
      for (int64_t n = 0; n < m.N; ++n) own[(t * m.N + n) * W + x] = from[at + n];
    }
}

template <class T>
static void run(const Run<T>& r, T* scratch) {
  constexpr int64_t W = lanes<T>;
  const Maps<T>& m = r.maps;
  const int64_t N = m.N, D = m.D, reach = r.maps.reach();
  const int64_t blocks = (r.d1 - r.d0 + W - 1) / W;
  RunTile<T>& tile = *(RunTile<T>*)scratch;
  T* rates = scratch + sizeof(RunTile<T>) / sizeof(T);  // (blocks, N, W), in powers of two
  T* carry = rates + blocks * N * W;                    // (blocks, reach, W) latest outputs
  T* window = carry + blocks * reach * W;               // (reach + steps, W)
  T* sums = window + (kRunSteps + reach) * W;           // (steps, W)
  T* own = sums + kRunSteps * W;                        // two of (steps, N, W)
  T* own_read = own + kRunSteps * N * W;
  T* taps = own_read + kRunSteps * N * W;               // (K, W)

  for (int64_t k = 0; k < blocks; ++k)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t x = 0; x < W; ++x) {
        const int64_t d = r.d0 + k * W + x;
        rates[(k * N + n) * W + x] = d < r.d1 ? m.A[d * N + n] * kLog2e<T> : T(0);
      }
  for (int64_t k = 0; k < blocks * reach * W; ++k) carry[k] = 0;

  for (int64_t first = r.first; first < r.last; first += kRunSteps) {
    const int64_t steps = r.last - first < kRunSteps ? r.last - first : kRunSteps;
    const int64_t begin = r.backward ? m.L - 1 - first : first;  // position of the first step
    const int64_t way = r.backward ? -1 : 1;
    if (r.sum)
      for (int64_t k = 0; k < steps * W; ++k) sums[k] = 0;
    for (int64_t k = 0; k < blocks; ++k) {
      const int64_t d = r.d0 + k * W, count = r.d1 - d < W ? r.d1 - d : W;
      const T* before = r.backward ? m.left : m.right;
      const T* after = r.backward ? m.right : m.left;
      for (int64_t t = 0; t < steps; ++t) {
        const int64_t i = begin + way * t, step = r.backward ? i + 1 : i;
        // The next block's: tokens lie too far apart for the hardware to foresee.
        const int64_t next = i * D + smaller(d + W, D - 1);
        __builtin_prefetch(m.dt + next);
        if (before) __builtin_prefetch(before + next);
        if (!r.shared) __builtin_prefetch(r.input + next);
        Vec<T> dt = step < m.L ? load_part(m.dt + step * D + d, count) : Vec<T>{};
        dt = dt < splat(T(kHugeStep)) ? dt : splat(T(kHugeStep));
        store(tile.dt + t * W, dt);
        Vec<T> in = r.shared ? splat(r.input[i]) : load_part(r.input + i * D + d, count);
        if (before) in *= load_part(before + i * D + d, count);
        store(tile.input + t * W, in);
        store(tile.output + t * W, Vec<T>{});
      }
      if (r.elapsed)
        for (int64_t t = 0; t < steps; ++t)
          for (int64_t x = 0; x < W; ++x) r.elapsed[k * W + x] += tile.dt[t * W + x];

      const bool emit = first + steps > r.emit - reach;
      T* state = r.state + k * N * W;
      const T* write = r.backward ? m.C : m.B;
      const T* read = r.backward ? m.B : m.C;
      if (m.group(d) == m.group(d + count - 1)) {
        const int64_t at = (begin * m.G + m.group(d)) * N;
        const SharedCoefficients<T> c{write + at, read + at, way * m.G * N};
        if (emit)
          run_all_states<true>(tile, c, rates + k * N * W, state, N, steps);
        else
          run_all_states<false>(tile, c, rates + k * N * W, state, N, steps);
      } else {
        own_coefficients(m, d, count, begin, way, steps, write, own);
        own_coefficients(m, d, count, begin, way, steps, read, own_read);
        const OwnCoefficients<T> c{own, own_read, N};
        run_all_states<true>(tile, c, rates + k * N * W, state, N, steps);
      }
      if (!emit) continue;

      for (int64_t t = 0; t < steps; ++t) {
        Vec<T> y = load(tile.output + t * W);
        if (after) y *= load_part(after + (begin + way * t) * D + d, count);
        store(tile.output + t * W, y);
      }
      const T* out = tile.output;
      if (m.conv) {
        // Backwards, the outputs of positions j .. j + reach are those of the latest steps.
        T* late = carry + k * reach * W;
        for (int64_t t = 0; t < reach * W; ++t) window[t] = late[t];
        for (int64_t t = 0; t < steps * W; ++t) window[reach * W + t] = tile.output[t];
        for (int64_t t = 0; t < reach * W; ++t) late[t] = window[steps * W + t];
        for (int64_t q = 0; q <= reach; ++q)
          for (int64_t x = 0; x < W; ++x)
            taps[q * W + x] = x < count ? m.conv[(d + x) * m.K + q] : T(0);
        for (int64_t t = 0; t < steps; ++t) {
          Vec<T> y{};
          for (int64_t q = 0; q <= reach; ++q)
            y += load(window + (t + q) * W) * load(taps + q * W);
          store(tile.output + t * W, y);
        }
      }
      for (int64_t t = r.emit > first ? r.emit - first : 0; t < steps; ++t) {
        const Vec<T> y = load(out + t * W);
        if (r.sum) store(sums + t * W, load(sums + t * W) + y);
        if (r.output) store_part(r.output + (begin + way * t) * D + d, y, count);
      }
    }
    if (r.sum)
      for (int64_t t = r.emit > first ? r.emit - first : 0; t < steps; ++t)
        r.sum[begin + way * t] += total<T>(load(sums + t * W));
  }
}

template <class T>
static void join(const Maps<T>& m, int64_t d0, int64_t d1, const double* elapsed, const T* before,
                 T* state) {
  constexpr int64_t W = lanes<T>;
  for (int64_t d = d0; d < d1; d += W)
    for (int64_t n = 0; n < m.N; ++n) {
      Vec<T> x{};
      for (int64_t k = 0; k < W && d + k < d1; ++k)
        x[k] = T(m.A[(d + k) * m.N + n] * kLog2e<double> * elapsed[d - d0 + k]);
      const int64_t at = ((d - d0) / W * m.N + n) * W;
      store(state + at, load(state + at) + exp2v<T>(x) * load(before + at));
    }
}
