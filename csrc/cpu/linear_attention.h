// Recurrences on a matrix-valued state, one per head: linear_attention_scan forwards,
// linear_attention_rmatvec and linear_attention_rows backwards. No includes here (see vec.h).
//
// Few columns ("narrow") are run as the recurrence is written, a vector of the state's rows at a
// time: what counts is to read the coefficients once, in the order in which they lie in memory.
// Many columns ("wide") go kSteps tokens at a time, in matrix products: of the tokens' reads with
// the state, of their writes into it, and of a triangle of scores between themselves. Decays are
// multiplied forward from the step they belong to, so every factor is at most one.

constexpr double kLowestLogDecay = -1e4;  // stands for -inf
constexpr int64_t kSteps = 8;
constexpr int64_t kLongSteps = 4 * kSteps;  // where outputs are only read from the state

// exp(log_decay) - 1, see exp2m1v.
template <class T>
INLINE Vec<T> decay_minus_one(Vec<T> log_decay) {
  const Vec<T> lowest = splat(T(kLowestLogDecay));
  return exp2m1v<T>((log_decay < lowest ? lowest : log_decay) * kLog2e<T>);
}

template <class T>
static int64_t heads_padded(int64_t states) {
  return round_up(states, larger(lanes<T>, kRows));
}

// ---- few columns ----------------------------------------------------------------------------

template <class T>
static int64_t narrow_scratch(const HeadsRun<T>& r) {
  return round_up(r.h1 - r.h0, lanes<T>);
}

// The coefficients of one token and head; m is exp(log_decay) - 1, one number or one
// per key.
template <class T>
struct Step {
  const T *query, *key, *log_decay, *erase, *probe;
  T decay_minus_one, bonus;
  int64_t N;
  bool per_key;

  INLINE Vec<T> row(const T* p, int64_t n) const { return load_part(p + n, N - n); }
  INLINE Vec<T> m(int64_t n) const {
    return per_key ? ::captum_ssm::CAPTUM_SSM_ISA::decay_minus_one<T>(row(log_decay, n))
                   : splat(decay_minus_one);
  }
};

template <bool delta, bool bonus, class T>
INLINE T step_forward(const Step<T>& c, T* s, T in) {
  constexpr int64_t W = lanes<T>;
  Vec<T> y{}, found{};
  const Vec<T> x = splat(in);
  for (int64_t n = 0; n < c.N; n += W) {
    Vec<T> h = load(s + n);
    if (bonus) y += c.row(c.query, n) * h;
    h += h * c.m(n);
    if (delta) {
      found += c.row(c.probe, n) * h;
    } else {
      h += c.row(c.key, n) * x;
      if (!bonus) y += c.row(c.query, n) * h;
    }
    store(s + n, h);
  }
  if (delta) {
    const Vec<T> f = splat(total<T>(found));
    for (int64_t n = 0; n < c.N; n += W) {
      const Vec<T> h = load(s + n) + (c.row(c.key, n) * x - c.row(c.erase, n) * f);
      if (!bonus) y += c.row(c.query, n) * h;
      store(s + n, h);
    }
  }
  return total<T>(y) + (bonus ? c.bonus * in : T(0));
}

template <bool delta, bool bonus, class T>
INLINE T step_backward(const Step<T>& c, T* s, T in) {
  constexpr int64_t W = lanes<T>;
  Vec<T> u{}, found{};
  const Vec<T> x = splat(in);
  const bool enters = in != T(0);
  for (int64_t n = 0; n < c.N; n += W) {
    Vec<T> h = load(s + n);
    if (!bonus && enters) h += c.row(c.query, n) * x;
    u += c.row(c.key, n) * h;
    if (delta) {
      found += c.row(c.erase, n) * h;
    } else {
      h += h * c.m(n);
      if (bonus && enters) h += c.row(c.query, n) * x;
    }
    store(s + n, h);
  }
  if (delta) {
    const Vec<T> f = splat(total<T>(found));
    for (int64_t n = 0; n < c.N; n += W) {
      Vec<T> h = load(s + n) - c.row(c.probe, n) * f;
      h += h * c.m(n);
      if (bonus && enters) h += c.row(c.query, n) * x;
      store(s + n, h);
    }
  }
  return total<T>(u) + (bonus ? c.bonus * in : T(0));
}

template <bool backward, bool delta, bool bonus, class T>
NOINLINE void run_narrow(const HeadsRun<T>& r, T* decays) {
  constexpr int64_t W = lanes<T>;
  const Heads<T>& m = r.heads;
  const int64_t padded = heads_padded<T>(m.N), heads = r.h1 - r.h0;
  for (int64_t step = r.first; step < r.last; ++step) {
    const int64_t t = backward ? m.L - 1 - step : step;
    if (!m.per_key) {
      for (int64_t h = 0; h < heads; ++h) decays[h] = *m.log_decay.at(t, r.h0 + h);
      for (int64_t h = 0; h < heads; h += W)
        store(decays + h, decay_minus_one<T>(load(decays + h)));
    }
    for (int64_t h = r.h0; h < r.h1; ++h) {
      // Fetches this head of the next token: backwards the hardware does not foresee it.
      const int64_t next = backward ? larger(t - 1, 0) : smaller(t + 1, m.L - 1);
      for (int64_t n = 0; n < m.N; n += 64 / int64_t(sizeof(T))) {
        __builtin_prefetch(m.query.at(next, h) + n, 0, 2);
        __builtin_prefetch(m.key.at(next, h) + n, 0, 2);
        if (m.per_key) __builtin_prefetch(m.log_decay.at(next, h) + n, 0, 2);
        if (delta) __builtin_prefetch(m.erase.at(next, h) + n, 0, 2);
        if (delta) __builtin_prefetch(m.probe.at(next, h) + n, 0, 2);
      }
      Step<T> c{m.query.at(t, h), m.key.at(t, h), m.log_decay.at(t, h), nullptr, nullptr,
                decays[h - r.h0], T(0), m.N, m.per_key};
      if (delta) c.erase = m.erase.at(t, h), c.probe = m.probe.at(t, h);
      if (bonus) c.bonus = *m.bonus.at(t, h);
      const T* in = r.input.at(t, h);
      T* s = r.state + (h - r.h0) * r.P * padded;
      for (int64_t p = 0; p < r.P; ++p, s += padded) {
        const T out = backward ? step_backward<delta, bonus>(c, s, in[p])
                               : step_forward<delta, bonus>(c, s, in[p]);
        if (r.output) r.output.at(t, h)[p] = out;
      }
      if (r.elapsed)
        for (int64_t n = 0; n < m.N; ++n) {
          const T a = c.log_decay[m.per_key ? n : 0];
          r.elapsed[(h - r.h0) * padded + n] +=
              a < T(kLowestLogDecay) ? kLowestLogDecay : double(a);
        }
    }
  }
}

template <class T>
static void narrow(const HeadsRun<T>& r, T* scratch) {
  const int64_t heads = round_up(r.h1 - r.h0, lanes<T>);
  for (int64_t h = 0; h < heads; ++h) scratch[h] = 0;
  const bool delta = bool(r.heads.erase), bonus = bool(r.heads.bonus);
  if (r.backward)
    (delta ? (bonus ? run_narrow<true, true, true, T> : run_narrow<true, true, false, T>)
           : (bonus ? run_narrow<true, false, true, T> : run_narrow<true, false, false, T>))(
        r, scratch);
  else
    (delta ? (bonus ? run_narrow<false, true, true, T> : run_narrow<false, true, false, T>)
           : (bonus ? run_narrow<false, false, true, T> : run_narrow<false, false, false, T>))(
        r, scratch);
}

template <class T>
static void join_heads(const HeadsRun<T>& r, const T* before) {
  constexpr int64_t W = lanes<T>;
  const int64_t padded = heads_padded<T>(r.heads.N);
  for (int64_t h = 0; h < r.h1 - r.h0; ++h)
    for (int64_t n = 0; n < padded; n += W) {
      Vec<T> x;
      for (int64_t k = 0; k < W; ++k) {
        const double e = r.elapsed[h * padded + n + k];
        x[k] = T(e < kLowestLogDecay ? kLowestLogDecay : e);
      }
      const Vec<T> decay = exp2v<T>(x * kLog2e<T>);
      for (int64_t p = 0; p < r.P; ++p) {
        const int64_t at = (h * r.P + p) * padded + n;
        store(r.state + at, load(r.state + at) + decay * load(before + at));
      }
    }
}

// ---- many columns ---------------------------------------------------------------------------

template <class T>
constexpr int64_t kBlock = kColumnVectors * lanes<T>;  // columns handled at once

// The coefficients of kSteps tokens relative to the state before them, in rows of `padded`:
//   found = find S,   y = read S + scores x,   S <- S + diag(m) S + write^T x - take^T found.
// Backwards, read and write are swapped, and so are find and take; scores are transposed.
template <class T>
struct Span {
  T *read, *write;   // (kSteps, padded); write has room for kLongSteps
  T *find, *take;    // likewise, only with a delta rule
  T* m;              // (kSteps, padded): exp(log_decay) - 1 of each token; first row in the end:
                     // of all tokens together
  T* scores;         // (kSteps, kSteps)
  T *rk, *re, *qe;   // likewise
  T *x, *y, *found;  // (kSteps, kBlock); y has room for kLongSteps
  T* state;          // (heads, blocks, padded, kBlock)
  int64_t total;

  Span(T* base, const Heads<T>& heads, int64_t together, int64_t columns) {
    const int64_t padded = heads_padded<T>(heads.N);
    Parts<T> parts{base};
    const bool delta = bool(heads.erase);
    read = parts.take(kSteps * padded);
    write = parts.take(kLongSteps * padded);
    find = parts.take(delta ? kSteps * padded : 0);
    take = parts.take(delta ? kSteps * padded : 0);
    m = parts.take(kSteps * padded);
    scores = parts.take(kSteps * kSteps);
    rk = parts.take(delta ? kSteps * kSteps : 0);
    re = parts.take(delta ? kSteps * kSteps : 0);
    qe = parts.take(delta ? kSteps * kSteps : 0);
    x = parts.take(kSteps * kBlock<T>);
    y = parts.take(kLongSteps * kBlock<T>);
    found = parts.take(delta ? kSteps * kBlock<T> : 0);
    state = parts.take(together * round_up(columns, kBlock<T>) * padded);
    total = parts.total;
  }
};

template <class T>
static int64_t wide_scratch(const Heads<T>& heads, int64_t count, int64_t columns) {
  return Span<T>(nullptr, heads, count, columns).total;
}

template <class T>
INLINE void copy_row(const T* from, int64_t N, int64_t padded, T* to) {
  for (int64_t n = 0; n < padded; n += lanes<T>) store(to + n, load_part(from + n, N - n));
}

// to -= factor * row
template <class T>
INLINE void subtract_row(T factor, const T* row, int64_t padded, T* to) {
  for (int64_t n = 0; n < padded; n += lanes<T>)
    store(to + n, load(to + n) - splat(factor) * load(row + n));
}

// The rows `count` from `row` on, those of earlier tokens, step on by one token whose decay is m:
// x . row goes to `scores` and y . row to `others` (where y), x being multiplied with the rows of
// before the step where `before`.
template <int count, class T>
INLINE void step_rows(T* row, const T* m, const T* x, bool before, const T* y, int64_t padded,
                      T* scores, T* others) {
  Vec<T> sum[count] = {}, other[count] = {};
  for (int64_t n = 0; n < padded; n += lanes<T>) {
    const Vec<T> mn = load(m + n), xn = load(x + n), yn = y ? load(y + n) : Vec<T>{};
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      Vec<T> w = load(row + j * padded + n);
      if (before) sum[j] += xn * w;
      w += w * mn;
      store(row + j * padded + n, w);
      if (!before) sum[j] += xn * w;
      if (y) other[j] += yn * w;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < count; ++j) {
    scores[j] = total<T>(sum[j]);
    if (y) others[j] = total<T>(other[j]);
  }
}

template <bool before, bool both, class T>
NOINLINE void step_all_rows(T* rows, int64_t count, const T* m, const T* x, const T* y,
                            int64_t padded, T* scores, T* others) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4)
    step_rows<4>(rows + j * padded, m, x, before, both ? y : nullptr, padded, scores + j,
                 others + j);
  for (; j < count; ++j)
    step_rows<1>(rows + j * padded, m, x, before, both ? y : nullptr, padded, scores + j,
                 others + j);
}

template <class T>
INLINE T dot(const T* a, const T* b, int64_t padded) {
  Vec<T> sum{};
  for (int64_t n = 0; n < padded; n += lanes<T>) sum += load(a + n) * load(b + n);
  return total<T>(sum);
}

// Tokens [t0, t0 + steps) of one head; the rows of missing ones are zero.
template <class T>
static void read_tokens(const Heads<T>& heads, int64_t h, int64_t t0, int64_t steps, Span<T>& s) {
  const int64_t N = heads.N, padded = heads_padded<T>(N);
  T decays[kSteps > lanes<T> ? kSteps : lanes<T>] = {};
  if (!heads.per_key) {
    for (int64_t i = 0; i < steps; ++i) decays[i] = *heads.log_decay.at(t0 + i, h);
    for (int64_t i = 0; i < kSteps; i += lanes<T>)
      store(decays + i, decay_minus_one<T>(load(decays + i)));
  }
  for (int64_t i = 0; i < kSteps; ++i) {
    const int64_t at = i * padded, valid = i < steps ? N : 0, t = i < steps ? t0 + i : t0;
    copy_row(heads.query.at(t, h), valid, padded, s.read + at);
    copy_row(heads.key.at(t, h), valid, padded, s.write + at);
    if (heads.erase) {
      copy_row(heads.probe.at(t, h), valid, padded, s.find + at);
      copy_row(heads.erase.at(t, h), valid, padded, s.take + at);
    }
    const T* a = heads.log_decay.at(t, h);
    for (int64_t n = 0; n < padded; n += lanes<T>)
      store(s.m + at + n, heads.per_key ? decay_minus_one<T>(load_part(a + n, valid - n))
                                        : splat(decays[i]));
  }
}

// The coefficients of a span before a delta rule's probes are solved: with found = find S + rk x -
// re found, y = read S + scores x - qe found and S <- S + diag(m) S + write^T x - take^T found.
template <class T>
static void make_rows(const Heads<T>& heads, int64_t h, int64_t t0, int64_t steps, Span<T>& s) {
  constexpr int64_t W = lanes<T>;
  const int64_t padded = heads_padded<T>(heads.N);
  const bool delta = bool(heads.erase), bonus = bool(heads.bonus);
  read_tokens(heads, h, t0, steps, s);
  for (int64_t k = 0; k < kSteps * kSteps; ++k) s.scores[k] = 0;
  if (delta)
    for (int64_t k = 0; k < kSteps * kSteps; ++k) s.rk[k] = s.re[k] = s.qe[k] = 0;

  for (int64_t i = 0; i < steps; ++i) {
    T* q = s.read + i * padded;
    T* r = s.find + i * padded;
    const T* m = s.m + i * padded;
    T *scores = s.scores + i * kSteps, *qe = s.qe + i * kSteps;
    const auto step_rows_on =
        bonus ? (delta ? step_all_rows<true, true, T> : step_all_rows<true, false, T>)
              : (delta ? step_all_rows<false, true, T> : step_all_rows<false, false, T>);
    step_rows_on(s.write, i, m, q, r, padded, scores, s.rk + i * kSteps);
    if (delta) step_rows_on(s.take, i, m, q, r, padded, qe, s.re + i * kSteps);
    if (bonus) {
      scores[i] = *heads.bonus.at(t0 + i, h);
    } else {
      scores[i] = dot(q, s.write + i * padded, padded);
      if (delta) qe[i] = dot(q, s.take + i * padded, padded);
    }
    // The first row of m becomes that of all tokens so far; m + c + m c does not cancel.
    for (int64_t n = 0; n < padded; n += W) {
      const Vec<T> own = load(m + n), before = i ? load(s.m + n) : Vec<T>{};
      const Vec<T> through = i ? before + (own + before * own) : own;
      store(q + n, load(q + n) + load(q + n) * (bonus ? before : through));
      if (delta) store(r + n, load(r + n) + load(r + n) * through);
      store(s.m + n, through);
    }
  }
}

// All coefficients of a span.
template <class T>
static void make_span(const Heads<T>& heads, int64_t h, int64_t t0, int64_t steps, Span<T>& s) {
  const int64_t padded = heads_padded<T>(heads.N);
  make_rows(heads, h, t0, steps, s);
  if (!heads.erase) return;

  // What a probe finds depends on what the probes before it found and had taken away: solved
  // here for the coefficients, so that the state sees products only.
  for (int64_t i = 0; i < steps; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const T e = s.re[i * kSteps + j];
      subtract_row(e, s.find + j * padded, padded, s.find + i * padded);
      for (int64_t k = 0; k < j; ++k) s.rk[i * kSteps + k] -= e * s.rk[j * kSteps + k];
    }
  for (int64_t i = 0; i < steps; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      const T e = s.qe[i * kSteps + j];
      subtract_row(e, s.find + j * padded, padded, s.read + i * padded);
      for (int64_t k = 0; k < j; ++k) s.scores[i * kSteps + k] -= e * s.rk[j * kSteps + k];
    }
  for (int64_t j = 0; j < steps; ++j)
    for (int64_t i = j + 1; i < steps; ++i)
      subtract_row(s.rk[i * kSteps + j], s.take + i * padded, padded, s.write + j * padded);
  // Where what is taken is what is written, the rows of `write` are these sums of those of `take`.
  for (int64_t j = 0; j < kSteps; ++j)
    for (int64_t i = 0; i < kSteps; ++i)
      s.re[j * kSteps + i] = i > j ? -s.rk[i * kSteps + j] : T(i == j);
}

// Only `write` and `m`, of at most kLongSteps steps backwards in which nothing enters or is erased.
template <class T>
static void make_writes(const Heads<T>& heads, int64_t h, int64_t t0, int64_t steps, Span<T>& s) {
  const int64_t padded = heads_padded<T>(heads.N);
  T decays[kLongSteps] = {};
  if (!heads.per_key) {
    for (int64_t i = 0; i < steps; ++i) decays[i] = *heads.log_decay.at(t0 + i, h);
    for (int64_t i = 0; i < kLongSteps; i += lanes<T>)
      store(decays + i, decay_minus_one<T>(load(decays + i)));
  }
  for (int64_t n = 0; n < padded; n += lanes<T>) {
    Vec<T> after{};
    for (int64_t i = round_up(steps, kSteps) - 1; i >= steps; --i)
      store(s.write + i * padded + n, Vec<T>{});
    for (int64_t i = steps - 1; i >= 0; --i) {
      const Vec<T> k = load_part(heads.key.at(t0 + i, h) + n, heads.N - n);
      store(s.write + i * padded + n, k + k * after);
      const Vec<T> m = heads.per_key ? decay_minus_one<T>(load_part(
                                           heads.log_decay.at(t0 + i, h) + n, heads.N - n))
                                     : splat(decays[i]);
      after = after + (m + after * m);
    }
    store(s.m + n, after);
  }
}

// out[r][c] = start[r][c] + sum_k A[r][k] B[k][c] (minus with `less`), for kRows rows and V vectors
// of columns; A's steps are given, out and B have rows of kBlock.
template <int V, bool less, class T>
INLINE void multiply_add(const T* A, int64_t row, int64_t step, const T* B, int64_t count,
                         Vec<T> (&sum)[kRows][V]) {
  for (int64_t k = 0; k < count; ++k) {
    Vec<T> b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) b[v] = load(B + k * kBlock<T> + v * lanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a = splat(A[r * row + k * step]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        if (less)
          sum[r][v] -= a * b[v];
        else
          sum[r][v] += a * b[v];
    }
  }
}

// out = rows A of `padded` times the state, plus scores times x where given.
template <int V, class T>
INLINE void read_state(const T* A, int64_t count, int64_t padded, int64_t N, const T* state,
                       const T* scores, int64_t score_row, int64_t score_step, const T* x,
                       T* out) {
  for (int64_t i = 0; i < count; i += kRows) {
    Vec<T> sum[kRows][V] = {};
    multiply_add<V, false>(A + i * padded, padded, 1, state, N, sum);
    if (scores)
      multiply_add<V, false>(scores + i * score_row, score_row, score_step, x, kSteps, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(out + (i + r) * kBlock<T> + v * lanes<T>, sum[r][v]);
  }
}

// state <- state + diag(m) state + A^T x - E^T found, the second where x, the third where found.
template <int V, class T>
INLINE void write_state(const T* m, const T* A, const T* x, const T* E, const T* found,
                        int64_t padded, T* state) {
  for (int64_t n = 0; n < padded; n += kRows) {
    Vec<T> sum[kRows][V];
    T* at = state + n * kBlock<T>;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Vec<T> h = load(at + r * kBlock<T> + v * lanes<T>);
        sum[r][v] = h + h * splat(m[n + r]);
      }
    if (x) multiply_add<V, false>(A + n, 1, padded, x, kSteps, sum);
    if (found) multiply_add<V, true>(E + n, 1, padded, found, kSteps, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(at + r * kBlock<T> + v * lanes<T>, sum[r][v]);
  }
}

// Passes a span through V vectors of a block's columns; `enters` where x is not zero.
template <int V, class T>
NOINLINE void pass_block(const Span<T>& s, const Heads<T>& heads, bool backward, bool enters,
                         T* state) {
  const int64_t N = heads.N, padded = heads_padded<T>(N);
  const T* scores = enters ? s.scores : nullptr;
  const T *read = backward ? s.write : s.read, *write = backward ? s.read : s.write;
  const T *find = backward ? s.take : s.find, *take = backward ? s.find : s.take;
  const T* none = nullptr;
  if (heads.erase) read_state<V>(find, kSteps, padded, N, state, none, 0, 0, none, s.found);
  if (backward && heads.erases_key())
    read_state<V>(s.re, kSteps, kSteps, kSteps, s.found, scores, 1, kSteps, s.x, s.y);
  else
    read_state<V>(read, kSteps, padded, N, state, scores, backward ? 1 : kSteps,
                  backward ? kSteps : 1, s.x, s.y);
  write_state<V>(s.m, write, enters ? s.x : nullptr, take, heads.erase ? s.found : nullptr, padded,
                 state);
}

// Reads the outputs of `steps` steps from a block, and has it decay over them; see make_writes.
template <int V, class T>
NOINLINE void read_block(const Span<T>& s, const Heads<T>& heads, int64_t steps, T* state) {
  const int64_t padded = heads_padded<T>(heads.N);
  const T* none = nullptr;
  read_state<V>(s.write, round_up(steps, kSteps), padded, heads.N, state, none, 0, 0, none, s.y);
  write_state<V>(s.m, none, none, none, none, padded, state);
}

// Has all of a block's state decayed to zero?
template <class T>
INLINE bool is_spent(const T* state, int64_t size) {
  for (int64_t k = 0; k < size; k += kBlock<T>) {
    Vec<T> any{};
#pragma GCC unroll 4
    for (int v = 0; v < kColumnVectors; ++v) {
      const Vec<T> x = load(state + k + v * lanes<T>);
      any += x < 0 ? -x : x;
    }
    if (!(total<T>(any) == 0)) return false;
  }
  return true;
}

// Goes through all spans of some heads. `load_block(h, k, t0, steps, x)` fills the inputs of a
// head's block and says whether any is not zero, `store_block(h, k, t0, steps, y)` takes its
// outputs (null: all zero). Blocks that nothing has entered yet cost nothing, and next to nothing
// those whose state has decayed to zero. `quiet(k, begin, end)` says that nothing enters between:
// backwards without a delta rule, such stretches are read in one go.
template <class T, class Load, class Store, class Quiet>
INLINE void run_wide(const Heads<T>& heads, int64_t h0, int64_t h1, bool backward, int64_t columns,
                     T* scratch, const Load& load_block, const Store& store_block,
                     const Quiet& quiet) {
  Span<T> s(scratch, heads, h1 - h0, columns);
  const int64_t padded = heads_padded<T>(heads.N);
  const int64_t blocks = round_up(columns, kBlock<T>) / kBlock<T>, size = padded * kBlock<T>;
  const bool delta = bool(heads.erase), stretches_pay = backward && !delta;
  for (int64_t k = 0; k < (h1 - h0) * blocks * size; ++k) s.state[k] = 0;
  int64_t live[kHeadsTogether] = {};  // blocks from here on are zero still
  const int64_t stretches = round_up(heads.L, kLongSteps) / kLongSteps;
  for (int64_t stretch = 0; stretch < stretches; ++stretch) {
    const int64_t begin = (backward ? stretches - 1 - stretch : stretch) * kLongSteps;
    const int64_t end = smaller(begin + kLongSteps, heads.L);
    const int64_t spans = round_up(end - begin, kSteps) / kSteps;
    for (int64_t h = h0; h < h1; ++h) {
      const int64_t before = live[h - h0];
      auto half = [&](int64_t k) { return columns - k * kBlock<T> <= lanes<T>; };
      auto state = [&](int64_t k) { return s.state + ((h - h0) * blocks + k) * size; };
      auto passed = [&](int64_t k) { return stretches_pay && k < before && quiet(k, begin, end); };
      int64_t spent = 0;  // blocks, which entered in order, that are zero all along the stretch
      for (; spent < before && quiet(spent, begin, end) && is_spent(state(spent), size); ++spent)
        store_block(h, spent, begin, end - begin, (const T*)nullptr);
      bool made = false;
      for (int64_t k = spent; k < before; ++k) {
        if (!passed(k)) continue;
        if (!made) make_writes(heads, h, begin, end - begin, s), made = true;
        (half(k) ? read_block<1, T> : read_block<kColumnVectors, T>)(s, heads, end - begin,
                                                                     state(k));
        store_block(h, k, begin, end - begin, (const T*)s.y);
      }
      for (int64_t span = 0; span < spans; ++span) {
        const int64_t t0 = begin + (backward ? spans - 1 - span : span) * kSteps;
        const int64_t steps = smaller(kSteps, end - t0);
        made = false;
        for (int64_t k = spent; k < blocks; ++k) {
          if (passed(k)) continue;
          const bool enters = load_block(h, k, t0, steps, s.x);
          if (!enters && (k >= live[h - h0] || is_spent(state(k), size))) {
            store_block(h, k, t0, steps, (const T*)nullptr);
            continue;
          }
          live[h - h0] = larger(live[h - h0], k + 1);
          if (!made) make_span(heads, h, t0, steps, s), made = true;
          (half(k) ? pass_block<1, T> : pass_block<kColumnVectors, T>)(s, heads, backward, enters,
                                                                       state(k));
          store_block(h, k, t0, steps, (const T*)s.y);
        }
      }
    }
  }
}

template <class T>
static void wide(const HeadsRun<T>& r, T* scratch) {
    run_wide(
        r.heads, r.h0, r.h1, r.backward, r.P, scratch,
        [&](int64_t h, int64_t k, int64_t t0, int64_t steps, T* x) {
          const int64_t c = k * kBlock<T>, count = smaller(kBlock<T>, r.P - c);
          bool enters = false;
          for (int64_t i = 0; i < kSteps; ++i) {
            Vec<T> any{};
            for (int64_t p = 0; p < kBlock<T>; p += lanes<T>) {
              const Vec<T> v =
                  i < steps ? load_part(r.input.at(t0 + i, h) + c + p, count - p) : Vec<T>{};
              any += v < 0 ? -v : v;
              store(x + i * kBlock<T> + p, v);
            }
            enters |= !(total<T>(any) == 0);
          }
          return enters;
        },
        [&](int64_t h, int64_t k, int64_t t0, int64_t steps, const T* y) {
          const int64_t c = k * kBlock<T>, count = smaller(kBlock<T>, r.P - c);
          for (int64_t i = 0; i < steps; ++i)
            for (int64_t p = 0; p < count; p += lanes<T>)
              store_part(r.output.at(t0 + i, h) + c + p,
                         y ? load(y + i * kBlock<T> + p) : Vec<T>{}, count - p);
        },
        [](int64_t, int64_t, int64_t) { return false; });
}

// The run whose inputs are unit vectors, of one head.
template <class T, class Store>
INLINE void run_rows(const HeadRows<T>& r, int64_t h, T* scratch, const Store& store_block) {
  auto load_block = [&](int64_t, int64_t k, int64_t t0, int64_t steps, T* x) {
    const int64_t c = k * kBlock<T>, count = smaller(kBlock<T>, r.count - c);
    bool enters = false;
    for (int64_t i = 0; i < kSteps * kBlock<T>; ++i) x[i] = 0;
    for (int64_t p = 0; p < count; ++p) {
      const int64_t i = r.rows[c + p] - t0;
      if (i >= 0 && i < steps) x[i * kBlock<T> + p] = 1, enters = true;
    }
    return enters;
  };
  // The first row of a block is its latest one, the last its earliest.
  auto quiet = [&](int64_t k, int64_t begin, int64_t end) {
    const int64_t c = k * kBlock<T>, last = smaller(c + kBlock<T>, r.count) - 1;
    return r.rows[c] < begin || r.rows[last] >= end;
  };
  run_wide(r.heads, h, h + 1, true, r.count, scratch, load_block, store_block, quiet);
}

template <class T>
static void head_rows(const HeadRows<T>& r, T* scratch) {
  const int64_t L = r.heads.L;
  auto write = [&](int64_t, int64_t k, int64_t t0, int64_t steps, const T* y) {
    const int64_t c = k * kBlock<T>, count = smaller(kBlock<T>, r.count - c);
    const int64_t* slots = r.slots + c;
    for (int64_t p = 0; p < count; ++p) {
      T* out = r.out + slots[p] * L + t0;
      // Rows are most often asked for in order: then four of them are the columns of a matrix.
      if (y && steps % 4 == 0 && p + 4 <= count && slots[p] - slots[p + 1] == 1 &&
          slots[p + 1] - slots[p + 2] == 1 && slots[p + 2] - slots[p + 3] == 1) {
        turn(y + p, kBlock<T>, steps, 4, out, -L);
        p += 3;
        continue;
      }
      for (int64_t i = 0; i < steps; ++i) out[i] = y ? y[i * kBlock<T> + p] : T(0);
    }
  };
  auto add = [&](int64_t, int64_t k, int64_t t0, int64_t steps, const T* y) {
    const int64_t c = k * kBlock<T>, count = smaller(kBlock<T>, r.count - c);
    for (int64_t i = 0; i < (y ? steps : 0); ++i) {
      T* sum = r.sum + (t0 + i) * r.count + c;
      for (int64_t p = 0; p < count; p += lanes<T>)
        store_part(sum + p, load_part(sum + p, count - p) + load(y + i * kBlock<T> + p), count - p);
    }
  };
  for (int64_t h = r.h0; h < r.h1; ++h)
    if (r.sum)
      run_rows(r, h, scratch, add);
    else
      run_rows(r, h, scratch, write);
}
