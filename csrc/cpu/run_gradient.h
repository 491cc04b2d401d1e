// The gradients of diagonal_scan. No includes here (see vec.h).
//
// With h_t = a_t h_(t-1) + B_t x_t, x = v right, y = left (C . h) and g = left times the gradient of
// y, the gradient of h_t is s_t = C_t g_t + a_(t+1) s_(t+1). All others are products of the two:
// s x for B, h g for C, s (a_t h_(t-1)) for the exponents A dt, s . B for x, h . C for left.
//
// The states are kept at the start of each stretch of steps only. Stretches are visited from the
// last to the first: a stretch's states are computed again, and what it needs of them is kept, for
// a few states at a time.

constexpr int64_t kGradientSteps = 32;
constexpr int kGradientStates = kStateBlock / 2;  // in registers: h or s, and sums for A

// A stretch of steps of one block of channels, and what is kept of a few of its states.
template <class T>
struct GradientTile {
  T dt[kGradientSteps * lanes<T>];
  T x[kGradientSteps * lanes<T>];
  T g[kGradientSteps * lanes<T>];
  T readout[kGradientSteps * lanes<T>];  // C . h
  T entry[kGradientSteps * lanes<T>];    // B . s
  T of_dt[kGradientSteps * lanes<T>];
  T decay_minus_one[kGradientSteps * kGradientStates * lanes<T>];
  T decayed[kGradientSteps * kGradientStates * lanes<T>];  // a_t h_(t-1)
};

template <class T>
struct GradientScratch {
  GradientTile<T>* tile;
  T* rates;        // (blocks, N, W), in powers of two
  T* adjoint;      // (blocks, N, W), a_(t+1) s_(t+1)
  T* of_A;         // (blocks, N, W)
  T* sum_B;        // (steps, N, W): sums over blocks of channels of one group, lane by lane
  T* sum_C;
  T* own_B;        // (steps, N, W), for blocks of several groups
  T* own_C;
  T* checkpoints;  // (stretches + 1, blocks, N, W): the states at the start of each
  T* run;          // scratch of the run that finds them
  int64_t total;

  GradientScratch(const RunGradient<T>& r, T* base) {
    constexpr int64_t W = lanes<T>;
    const int64_t N = r.maps.N, states = (r.d1 - r.d0 + W - 1) / W * N * W;
    const int64_t stretches = (r.maps.L + kGradientSteps - 1) / kGradientSteps;
    Parts<T> parts{base};
    tile = (GradientTile<T>*)parts.take(sizeof(GradientTile<T>) / sizeof(T));
    rates = parts.take(states);
    adjoint = parts.take(states);
    of_A = parts.take(states);
    sum_B = parts.take(kGradientSteps * N * W);
    sum_C = parts.take(kGradientSteps * N * W);
    own_B = parts.take(kGradientSteps * N * W);
    own_C = parts.take(kGradientSteps * N * W);
    checkpoints = parts.take(r.states() ? (stretches + 1) * states : states);
    Run<T> forward{};
    forward.maps = r.maps, forward.d0 = r.d0, forward.d1 = r.d1;
    run = parts.take(run_scratch(forward));
    total = parts.total;
  }
};

template <class T>
static int64_t gradient_scratch(const RunGradient<T>& r) {
  return GradientScratch<T>(r, (T*)nullptr).total;
}

// The states of a stretch from `state` on, NB of them.
template <int NB, class T, class Coefficients>
INLINE void replay_states(const RunGradient<T>& r, GradientTile<T>& tile, const Coefficients& c,
                          const T* rate, const T* state, T* sum_C, int64_t n0, int64_t steps) {
  constexpr int64_t W = lanes<T>;
  Vec<T> h[NB];
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) h[n] = load(state + (n0 + n) * W);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<T> dt = load(tile.dt + t * W), x = load(tile.x + t * W), g = load(tile.g + t * W);
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) {
      const Vec<T> m = exp2m1v<T>(load(rate + (n0 + n) * W) * dt);
      h[n] += h[n] * m;
      store(tile.decay_minus_one + (t * NB + n) * W, m);
      store(tile.decayed + (t * NB + n) * W, h[n]);
      h[n] += c.written(t, n0 + n) * x;
    }
    if (r.of_C)
#pragma GCC unroll 16
      for (int n = 0; n < NB; ++n) {
        T* sum = sum_C + (t * r.maps.N + n0 + n) * W;
        store(sum, load(sum) + g * h[n]);
      }
    if (r.of_left) {
      Vec<T> sum = load(tile.readout + t * W);
#pragma GCC unroll 16
      for (int n = 0; n < NB; ++n) sum += c.readout(t, n0 + n) * h[n];
      store(tile.readout + t * W, sum);
    }
  }
}

// Their gradients, from the last step of the stretch to the first.
template <int NB, class T, class Coefficients>
INLINE void adjoint_states(const RunGradient<T>& r, GradientTile<T>& tile, const Coefficients& c,
                           const T* rate, T* adjoint, T* of_A, T* sum_B, int64_t n0,
                           int64_t steps) {
  constexpr int64_t W = lanes<T>;
  Vec<T> s[NB], rates[NB] = {};
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) s[n] = load(adjoint + (n0 + n) * W);
  const bool enters = r.of_v || r.of_right, decays = r.of_dt || r.of_A;
  for (int64_t t = steps - 1; t >= 0; --t) {
    const Vec<T> x = load(tile.x + t * W), g = load(tile.g + t * W);
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) s[n] += c.readout(t, n0 + n) * g;
    if (enters) {
      Vec<T> sum = load(tile.entry + t * W);
#pragma GCC unroll 16
      for (int n = 0; n < NB; ++n) sum += c.written(t, n0 + n) * s[n];
      store(tile.entry + t * W, sum);
    }
    if (r.of_B)
#pragma GCC unroll 16
      for (int n = 0; n < NB; ++n) {
        T* sum = sum_B + (t * r.maps.N + n0 + n) * W;
        store(sum, load(sum) + x * s[n]);
      }
    if (decays) {
      const Vec<T> dt = load(tile.dt + t * W);
      Vec<T> sum = load(tile.of_dt + t * W);
#pragma GCC unroll 16
      for (int n = 0; n < NB; ++n) {
        const Vec<T> of_exponent = s[n] * load(tile.decayed + (t * NB + n) * W);
        sum += of_exponent * load(rate + (n0 + n) * W);
        rates[n] += of_exponent * dt;
      }
      store(tile.of_dt + t * W, sum);
    }
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) s[n] += s[n] * load(tile.decay_minus_one + (t * NB + n) * W);
  }
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) {
    store(adjoint + (n0 + n) * W, s[n]);
    store(of_A + (n0 + n) * W, load(of_A + (n0 + n) * W) + rates[n]);
  }
}

template <class T, class Coefficients>
NOINLINE void all_gradients(const RunGradient<T>& r, GradientScratch<T>& s, const Coefficients& c,
                            const T* start, int64_t block, int64_t steps) {
  const int64_t N = r.maps.N, at = block * N * lanes<T>;
  auto some = [&](auto count, int64_t n) INLINE_LAMBDA {
    constexpr int NB = decltype(count)::value;
    replay_states<NB>(r, *s.tile, c, s.rates + at, start + at, s.sum_C, n, steps);
    if (r.adjoint())
      adjoint_states<NB>(r, *s.tile, c, s.rates + at, s.adjoint + at, s.of_A + at, s.sum_B, n,
                         steps);
  };
  int64_t n = 0;
  for (; n + kGradientStates <= N; n += kGradientStates)
    some(std::integral_constant<int, kGradientStates>(), n);
  for (; n < N; ++n) some(std::integral_constant<int, 1>(), n);
}

// Adds sums of a block of channels to gradients (L, groups, N) at positions from `first` on, and
// sets them to zero: all lanes where the block shares its group, otherwise each to its own.
template <class T>
static void add_to_groups(const RunGradient<T>& r, int64_t d, int64_t count, int64_t first,
                          int64_t steps, T* sum, T* to) {
  constexpr int64_t W = lanes<T>;
  const Maps<T>& m = r.maps;
  const int64_t g0 = m.group(r.d0), groups = r.groups();
  const bool shared = m.group(d) == m.group(d + count - 1);
  for (int64_t t = 0; t < steps; ++t)
    for (int64_t n = 0; n < m.N; ++n, sum += W) {
      T* at = to + (first + t) * groups * m.N + n;
      if (shared)
        at[(m.group(d) - g0) * m.N] += total<T>(load(sum));
      else
        for (int64_t x = 0; x < count; ++x) at[(m.group(d + x) - g0) * m.N] += sum[x];
      store(sum, Vec<T>{});
    }
}

// Reads the steps of a stretch, and what they do to a block of channels.
template <class T>
static void read_stretch(const RunGradient<T>& r, int64_t d, int64_t count, int64_t first,
                         int64_t steps, GradientTile<T>& tile) {
  constexpr int64_t W = lanes<T>;
  const Maps<T>& m = r.maps;
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t at = (first + t) * m.D + d;
    const Vec<T> dt = load_part(m.dt + at, count), huge = splat(T(kHugeStep));
    store(tile.dt + t * W, dt < huge ? dt : huge);
    store(tile.x + t * W, load_part(r.v + at, count) * load_part(m.right + at, count));
    Vec<T> g = load_part(r.output + at, count);
    if (m.left) g *= load_part(m.left + at, count);
    store(tile.g + t * W, g);
    store(tile.readout + t * W, Vec<T>{});
    store(tile.entry + t * W, Vec<T>{});
    store(tile.of_dt + t * W, Vec<T>{});
  }
}

// Writes the gradients of what is given per token and channel.
template <class T>
static void write_stretch(const RunGradient<T>& r, int64_t d, int64_t count, int64_t first,
                          int64_t steps, const GradientTile<T>& tile) {
  constexpr int64_t W = lanes<T>;
  const Maps<T>& m = r.maps;
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t at = (first + t) * m.D + d;
    const Vec<T> entry = load(tile.entry + t * W);
    if (r.of_v) store_part(r.of_v + at, entry * load_part(m.right + at, count), count);
    if (r.of_right) store_part(r.of_right + at, entry * load_part(r.v + at, count), count);
    // The rates are in powers of two.
    if (r.of_dt)
      store_part(r.of_dt + at, load(tile.of_dt + t * W) * splat(T(1) / kLog2e<T>), count);
    if (r.of_left)
      store_part(r.of_left + at,
                 load(tile.readout + t * W) * load_part(r.output + at, count), count);
  }
}

// The states at the start of every stretch.
template <class T>
static void find_checkpoints(const RunGradient<T>& r, GradientScratch<T>& s, int64_t states) {
  for (int64_t k = 0; k < states; ++k) s.checkpoints[k] = 0;
  if (!r.states()) return;
  Run<T> forward{};
  forward.maps = r.maps, forward.input = r.v, forward.d0 = r.d0, forward.d1 = r.d1;
  forward.emit = r.maps.L;
  for (int64_t first = 0; first + kGradientSteps < r.maps.L; first += kGradientSteps) {
    const T* before = s.checkpoints + first / kGradientSteps * states;
    forward.state = s.checkpoints + (first / kGradientSteps + 1) * states;
    for (int64_t k = 0; k < states; ++k) forward.state[k] = before[k];
    forward.first = first, forward.last = first + kGradientSteps;
    run(forward, s.run);
  }
}

template <class T>
static void gradient(const RunGradient<T>& r, T* scratch) {
  constexpr int64_t W = lanes<T>;
  const Maps<T>& m = r.maps;
  const int64_t N = m.N, blocks = (r.d1 - r.d0 + W - 1) / W, states = blocks * N * W;
  GradientScratch<T> s(r, scratch);
  find_checkpoints(r, s, states);
  for (int64_t k = 0; k < states; ++k) s.adjoint[k] = s.of_A[k] = 0;
  for (int64_t k = 0; k < kGradientSteps * N * W; ++k) s.sum_B[k] = s.sum_C[k] = 0;
  for (int64_t k = 0; k < blocks * W; ++k)
    for (int64_t n = 0; n < N; ++n) {
      const int64_t d = r.d0 + k;
      s.rates[(k / W * N + n) * W + k % W] = d < r.d1 ? m.A[d * N + n] * kLog2e<T> : T(0);
    }

  for (int64_t first = (m.L - 1) / kGradientSteps * kGradientSteps; first >= 0;
       first -= kGradientSteps) {
    const int64_t steps = m.L - first < kGradientSteps ? m.L - first : kGradientSteps;
    const T* start = s.checkpoints + (r.states() ? first / kGradientSteps * states : 0);
    for (int64_t k = 0; k < blocks; ++k) {
      const int64_t d = r.d0 + k * W, count = r.d1 - d < W ? r.d1 - d : W;
      const int64_t group = m.group(d + count - 1);
      read_stretch(r, d, count, first, steps, *s.tile);
      if (m.group(d) == group) {
        const int64_t at = (first * m.G + group) * N;
        const SharedCoefficients<T> c{m.B + at, m.C + at, m.G * N};
        all_gradients(r, s, c, start, k, steps);
      } else {
        own_coefficients(m, d, count, first, 1, steps, m.B, s.own_B);
        own_coefficients(m, d, count, first, 1, steps, m.C, s.own_C);
        all_gradients(r, s, OwnCoefficients<T>{s.own_B, s.own_C, N}, start, k, steps);
      }
      write_stretch(r, d, count, first, steps, *s.tile);
      // The sums of the blocks that share a group are added up across their lanes only once.
      const int64_t next = d + W, last = smaller(next + W, r.d1) - 1;
      if (next < r.d1 && m.group(d) == m.group(last)) continue;
      if (r.of_B) add_to_groups(r, d, count, first, steps, s.sum_B, r.of_B);
      if (r.of_C) add_to_groups(r, d, count, first, steps, s.sum_C, r.of_C);
    }
  }
  if (!r.of_A) return;
  for (int64_t k = 0; k < r.d1 - r.d0; ++k)
    for (int64_t n = 0; n < N; ++n)
      r.of_A[(r.d0 + k) * N + n] = s.of_A[(k / W * N + n) * W + k % W];
}
