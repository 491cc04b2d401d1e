// The gradients of linear_attention_scan where each key has a decay of its own (for one per head, see
// linear_attention_gradient_chunks.h). No includes here (see vec.h).
//
// A head's state S and its gradient R go kSteps tokens at a time, as in linear_attention.h, but with
// a row of N numbers for each column of values. Reads are those of q, whose values are the gradient g
// of the output, and of r, whose values z are the gradient of what was found. Writes are those of k,
// with values v, and of e, with the negative of what was found. What a write leaves for a later read
// is the decay between them times the product of their values: summed over writes it is the gradient
// of the read, summed over reads that of the write, and each decay between them has their product
// with the coefficients as gradient. Nothing is subtracted, and no decay is divided by.
//
// The states are kept at the start of each segment of spans only, and computed again, segment by
// segment, from the last one to the first. The heads of a task take turns by segments: those of one
// token share its pages of memory.

constexpr int64_t kSegmentSpans = 32;
constexpr int64_t kSegmentBytes = 4 << 20;  // of the states of a segment

template <class T>
struct GradientSpace {
  int64_t padded, columns;    // N, P in whole vectors and whole micro tiles
  int64_t size;               // of a state: columns * padded
  int64_t spans, per_segment, segments;
  Span<T> span;
  T* first_m;                 // (padded) exp(log_decay) - 1 of the first token
  T* v;                       // (kLongSteps, columns)
  T *g, *z, *of_v;            // (kSteps, columns)
  T *gv, *zv, *gf, *zf;       // (kSteps, kSteps) products of the values of reads and writes
  T *from_q, *from_r;         // (kSteps, padded) S times the values of reads
  T *from_k, *from_e;         // R times the values of writes
  T* through;                 // (padded) sums of R S over columns
  T* found;                   // (tokens of a segment, columns), the negative of it
  T* states;                  // (per_segment + 1, columns, padded)
  T* starts;                  // (heads, segments, columns, padded)
  T* adjoints;                // (heads, columns, padded)
  T* adjoint;                 // the one of the head at hand
  int64_t total;

  GradientSpace(const HeadsGradient<T>& r, T* base)
      : padded(heads_padded<T>(r.heads.N)), columns(round_up(r.P, larger(kRows, lanes<T>))),
        size(columns * padded), spans(round_up(r.heads.L, kSteps) / kSteps),
        per_segment(smaller(smaller(spans, kSegmentSpans),
                            larger(4, kSegmentBytes / int64_t(size * sizeof(T))))),
        segments((spans + per_segment - 1) / per_segment), span(base, r.heads, 0, 0) {
    Parts<T> parts{base, span.total};
    first_m = parts.take(padded);
    v = parts.take(kLongSteps * columns);
    g = parts.take(kSteps * columns);
    z = parts.take(kSteps * columns);
    of_v = parts.take(kSteps * columns);
    gv = parts.take(kSteps * kSteps);
    zv = parts.take(kSteps * kSteps);
    gf = parts.take(kSteps * kSteps);
    zf = parts.take(kSteps * kSteps);
    from_q = parts.take(kSteps * padded);
    from_r = parts.take(kSteps * padded);
    from_k = parts.take(kSteps * padded);
    from_e = parts.take(kSteps * padded);
    through = parts.take(padded);
    found = parts.take(per_segment * kSteps * columns);
    states = parts.take((per_segment + 1) * size);
    starts = parts.take((r.h1 - r.h0) * segments * size);
    adjoints = parts.take((r.h1 - r.h0) * size);
    total = parts.total;
  }
};

template <class T>
static int64_t spans_gradient_scratch(const HeadsGradient<T>& r) {
  return GradientSpace<T>(r, (T*)nullptr).total;
}

// sum[r][v] += sum_k A[r * row + k * step] B[k * padded + v], for kRows rows and V vectors.
template <int V, class T>
INLINE void add_products(const T* A, int64_t row, int64_t step, const T* B, int64_t padded,
                         int64_t count, Vec<T> (&sum)[kRows][V]) {
  for (int64_t k = 0; k < count; ++k) {
    Vec<T> b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) b[v] = load(B + k * padded + v * lanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a = splat(A[r * row + k * step]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += a * b[v];
    }
  }
}

// The vectors from n on of to <- from + diag(m) from + values^T rows, plus more^T others where given,
// over `steps` tokens.
template <int V, class T>
INLINE void write_vectors(const GradientSpace<T>& s, int64_t steps, const T* from, const T* values,
                          const T* rows, const T* more, const T* others, int64_t n, T* to) {
  for (int64_t p = 0; p < s.columns; p += kRows) {
    Vec<T> sum[kRows][V];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Vec<T> h = load(from + (p + r) * s.padded + n + v * lanes<T>);
        sum[r][v] = h + h * load(s.span.m + n + v * lanes<T>);
      }
    add_products<V>(values + p, 1, s.columns, rows + n, s.padded, steps, sum);
    if (more) add_products<V>(more + p, 1, s.columns, others + n, s.padded, steps, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        store(to + (p + r) * s.padded + n + v * lanes<T>, sum[r][v]);
  }
}

template <class T>
NOINLINE void write_rows(const GradientSpace<T>& s, int64_t steps, const T* from, const T* values,
                         const T* rows, const T* more, const T* others, T* to) {
  int64_t n = 0;
  for (; n + 2 * lanes<T> <= s.padded; n += 2 * lanes<T>)
    write_vectors<2>(s, steps, from, values, rows, more, others, n, to);
  if (n < s.padded) write_vectors<1>(s, steps, from, values, rows, more, others, n, to);
}

// to[i][n] = sum_p values[i][p] state[p][n]
template <int V, class T>
INLINE void collect_vectors(const GradientSpace<T>& s, const T* values, const T* state, int64_t n,
                            T* to) {
  for (int64_t i = 0; i < kSteps; i += kRows) {
    Vec<T> sum[kRows][V] = {};
    add_products<V>(values + i * s.columns, s.columns, 1, state + n, s.padded, s.columns, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(to + (i + r) * s.padded + n + v * lanes<T>, sum[r][v]);
  }
}

template <class T>
NOINLINE void collect(const GradientSpace<T>& s, const T* values, const T* state, T* to) {
  int64_t n = 0;
  for (; n + 2 * lanes<T> <= s.padded; n += 2 * lanes<T>)
    collect_vectors<2>(s, values, state, n, to);
  if (n < s.padded) collect_vectors<1>(s, values, state, n, to);
}

// to[n] = sum_p state[p][n] adjoint[p][n]
template <class T>
NOINLINE void multiply_states(const GradientSpace<T>& s, const T* state, T* to) {
  for (int64_t n = 0; n < s.padded; n += lanes<T>) store(to + n, Vec<T>{});
  for (int64_t p = 0; p < s.columns; p += 2) {
    const T *x = state + p * s.padded, *y = s.adjoint + p * s.padded;
    for (int64_t n = 0; n < s.padded; n += lanes<T>)
      store(to + n, load(to + n) + load(x + n) * load(y + n) +
                        load(x + s.padded + n) * load(y + s.padded + n));
  }
}

// to[i][p] = sum_n rows[i][n] state[p][n]
template <class T>
NOINLINE void read_columns(const GradientSpace<T>& s, const T* rows, const T* state, T* to) {
  for (int64_t i = 0; i < kSteps; i += kRows)
    for (int64_t p = 0; p < s.columns; p += 2) {
      Vec<T> sum[kRows][2] = {};
      for (int64_t n = 0; n < s.padded; n += lanes<T>) {
        const Vec<T> a = load(state + p * s.padded + n), b = load(state + (p + 1) * s.padded + n);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec<T> x = load(rows + (i + r) * s.padded + n);
          sum[r][0] += x * a;
          sum[r][1] += x * b;
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        to[(i + r) * s.columns + p] = total<T>(sum[r][0]);
        to[(i + r) * s.columns + p + 1] = total<T>(sum[r][1]);
      }
    }
}

// to += factor x, over all columns
template <class T>
INLINE void add_columns(const GradientSpace<T>& s, T factor, const T* x, T* to) {
  for (int64_t p = 0; p < s.columns; p += lanes<T>)
    store(to + p, load(to + p) + splat(factor) * load(x + p));
}

// Values of a span, zero for missing tokens and columns.
template <class T>
static void read_values(const GradientSpace<T>& s, const Rows<const T>& from, int64_t h, int64_t t0,
                        int64_t steps, int64_t P, T* to) {
  for (int64_t i = 0; i < round_up(steps, kSteps); ++i)
    for (int64_t p = 0; p < s.columns; p += lanes<T>)
      store(to + i * s.columns + p,
            i < steps && p < P ? load_part(from.at(t0 + i, h) + p, P - p) : Vec<T>{});
}

// The state after `steps` tokens, at most kSteps with a delta rule and kLongSteps without; `found` is
// the negative of what was found.
template <class T>
static void pass_forward(const HeadsGradient<T>& r, GradientSpace<T>& s, int64_t h, int64_t t0,
                         int64_t steps, const T* state, T* found, T* next) {
  read_values(s, r.v, h, t0, steps, r.P, s.v);
  if (!r.heads.erase) {
    make_writes(r.heads, h, t0, steps, s.span);
    const T* none = nullptr;
    write_rows(s, steps, state, s.v, s.span.write, none, none, next);
    return;
  }
  make_rows(r.heads, h, t0, steps, s.span);
  read_columns(s, s.span.find, state, found);
  for (int64_t i = 0; i < kSteps; ++i) {
    T* own = found + i * s.columns;
    for (int64_t p = 0; p < s.columns; ++p) own[p] = -own[p];
    for (int64_t j = 0; j < i; ++j) {
      add_columns(s, -s.span.rk[i * kSteps + j], s.v + j * s.columns, own);
      add_columns(s, -s.span.re[i * kSteps + j], found + j * s.columns, own);
    }
  }
  write_rows(s, kSteps, state, s.v, s.span.write, found, s.span.take, next);
}

// to[i][j] = x[i] . y[j], over all columns
template <class T>
static void multiply_values(const GradientSpace<T>& s, const T* x, const T* y, T* to) {
  for (int64_t i = 0; i < kSteps; ++i)
    for (int64_t j = 0; j < kSteps; ++j)
      to[i * kSteps + j] = dot(x + i * s.columns, y + j * s.columns, s.columns);
}

// One vector of the coefficients of a span and of their gradients.
template <class T>
struct SpanVectors {
  Vec<T> q[kSteps], k[kSteps], r[kSteps], e[kSteps], m[kSteps];
  Vec<T> of_q[kSteps], of_k[kSteps], of_r[kSteps], of_e[kSteps], of_decay[kSteps];
};

// The gradient of a read: the state before the span and `writes` writes, as they have decayed, times
// the products of their values. Tokens up to `last` decay between those writes and the read.
template <bool delta, class T>
INLINE Vec<T> gradient_of_read(Vec<T> read, Vec<T> of_state, const Vec<T>* k, const T* v,
                               const Vec<T>* e, const T* f, int64_t writes, int64_t last,
                               Vec<T>* of_decay) {
  Vec<T> sum = of_state;
#pragma GCC unroll 8
  for (int64_t j = 0; j < kSteps; ++j) {
    if (j <= last) of_decay[j] += read * sum;
    if (j >= writes) continue;
    sum += k[j] * splat(v[j]);
    if (delta) sum += e[j] * splat(f[j]);
  }
  return sum;
}

// Reads of each token, from the first one on, with the decays on the way. Missing tokens are zero.
template <bool delta, bool bonus, class T>
INLINE void gradients_of_reads(const GradientSpace<T>& s, int64_t n, SpanVectors<T>& c) {
  Vec<T> k[kSteps], e[kSteps], decay = splat(T(1));
  auto own = [&](const T* from, int64_t i) INLINE_LAMBDA { return load(from + i * s.padded + n); };
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSteps; ++i) {
    const T *gv = s.gv + i * kSteps, *gf = s.gf + i * kSteps;
    if (bonus)
      c.of_q[i] = gradient_of_read<delta>(c.q[i], decay * own(s.from_q, i), k, gv, e, gf, i, i - 1,
                                          c.of_decay);
    decay += decay * c.m[i];
#pragma GCC unroll 8
    for (int64_t j = 0; j < i; ++j) {
      k[j] += k[j] * c.m[i];
      if (delta) e[j] += e[j] * c.m[i];
    }
    if (delta)
      c.of_r[i] = gradient_of_read<delta>(c.r[i], decay * own(s.from_r, i), k, s.zv + i * kSteps, e,
                                          s.zf + i * kSteps, i, i, c.of_decay);
    k[i] = c.k[i];
    if (delta) e[i] = c.e[i];
    if (!bonus)
      c.of_q[i] = gradient_of_read<delta>(c.q[i], decay * own(s.from_q, i), k, gv, e, gf, i + 1, i,
                                          c.of_decay);
  }
  // The state after the span is one more read.
  Vec<T> sum = decay * load(s.through + n);
#pragma GCC unroll 8
  for (int64_t j = 0; j < kSteps; ++j) {
    c.of_decay[j] += sum;
    sum += k[j] * own(s.from_k, j);
    if (delta) sum += e[j] * own(s.from_e, j);
  }
}

// Writes of each token, from the last one on.
template <bool delta, bool bonus, class T>
INLINE void gradients_of_writes(const GradientSpace<T>& s, int64_t n, SpanVectors<T>& c) {
  Vec<T> q[kSteps], r[kSteps], decay = splat(T(1));
#pragma GCC unroll 8
  for (int64_t i = kSteps - 1; i >= 0; --i) {
    if (!bonus) q[i] = c.q[i];
    Vec<T> of_k = decay * load(s.from_k + i * s.padded + n), of_e{};
    if (delta) of_e = decay * load(s.from_e + i * s.padded + n);
#pragma GCC unroll 8
    for (int64_t j = bonus ? i + 1 : i; j < kSteps; ++j) {
      of_k += q[j] * splat(s.gv[j * kSteps + i]);
      if (delta) of_e += q[j] * splat(s.gf[j * kSteps + i]);
    }
    if (delta)
#pragma GCC unroll 8
      for (int64_t j = i + 1; j < kSteps; ++j) {
        of_k += r[j] * splat(s.zv[j * kSteps + i]);
        of_e += r[j] * splat(s.zf[j * kSteps + i]);
      }
    c.of_k[i] = of_k, c.of_e[i] = of_e;
    if (delta) r[i] = c.r[i];
    decay += decay * c.m[i];
#pragma GCC unroll 8
    for (int64_t j = bonus ? i + 1 : i; j < kSteps; ++j) q[j] += q[j] * c.m[i];
    if (delta)
#pragma GCC unroll 8
      for (int64_t j = i; j < kSteps; ++j) r[j] += r[j] * c.m[i];
    if (bonus) q[i] = c.q[i];
  }
}

// The gradients of all coefficients of a span, from the products with the states and between values.
template <bool delta, bool bonus, class T>
NOINLINE void gradients_of_coefficients(const HeadsGradient<T>& r, const GradientSpace<T>& s,
                                        int64_t h, int64_t t0, int64_t steps) {
  const Heads<T>& m = r.heads;
  for (int64_t n = 0; n < m.N; n += lanes<T>) {
    SpanVectors<T> c;
    for (int64_t i = 0; i < kSteps; ++i) {
      auto row = [&](const Rows<const T>& x) INLINE_LAMBDA {
        return i < steps ? load_part(x.at(t0 + i, h) + n, m.N - n) : Vec<T>{};
      };
      c.q[i] = row(m.query), c.k[i] = row(m.key);
      if (delta) c.r[i] = row(m.probe), c.e[i] = row(m.erase);
      c.m[i] = i ? load(s.span.m + i * s.padded + n) : load(s.first_m + n);
      c.of_decay[i] = Vec<T>{};
    }
    if (r.states()) gradients_of_reads<delta, bonus>(s, n, c);
    if (r.adjoint()) gradients_of_writes<delta, bonus>(s, n, c);
    for (int64_t i = 0; i < steps; ++i) {
      auto put = [&](const Rows<T>& to, Vec<T> x) INLINE_LAMBDA {
        if (to) store_part(to.at(t0 + i, h) + n, x, m.N - n);
      };
      put(r.of_query, c.of_q[i]);
      put(r.of_key, c.of_k[i]);
      if (delta) put(r.of_probe, c.of_r[i]);
      if (delta) put(r.of_erase, c.of_e[i]);
      put(r.of_log_decay, c.of_decay[i]);
    }
  }
  if (r.of_bonus)
    for (int64_t i = 0; i < steps; ++i) *r.of_bonus.at(t0 + i, h) = s.gv[i * kSteps + i];
}

// The gradients of the values: z, of what was found, and of_v.
template <class T>
static void gradients_of_values(GradientSpace<T>& s, bool delta) {
  const int64_t columns = s.columns;
  if (delta) {
    read_columns(s, s.span.take, s.adjoint, s.z);
    for (int64_t j = kSteps - 1; j >= 0; --j) {
      T* own = s.z + j * columns;
      for (int64_t p = 0; p < columns; ++p) own[p] = -own[p];
      for (int64_t i = j; i < kSteps; ++i) {
        add_columns(s, -s.span.qe[i * kSteps + j], s.g + i * columns, own);
        if (i > j) add_columns(s, -s.span.re[i * kSteps + j], s.z + i * columns, own);
      }
    }
  }
  read_columns(s, s.span.write, s.adjoint, s.of_v);
  for (int64_t j = 0; j < kSteps; ++j)
    for (int64_t i = j; i < kSteps; ++i) {
      add_columns(s, s.span.scores[i * kSteps + j], s.g + i * columns, s.of_v + j * columns);
      if (delta && i > j)
        add_columns(s, s.span.rk[i * kSteps + j], s.z + i * columns, s.of_v + j * columns);
    }
}

// One span of the gradients.
template <class T>
static void pass_backward(const HeadsGradient<T>& r, GradientSpace<T>& s, int64_t h, int64_t t0,
                          const T* state, const T* found) {
  const int64_t steps = smaller(kSteps, r.heads.L - t0), P = r.P;
  const bool delta = bool(r.heads.erase), bonus = bool(r.heads.bonus);
  Span<T>& span = s.span;
  make_rows(r.heads, h, t0, steps, span);
  const T* a = r.heads.log_decay.at(t0, h);
  for (int64_t n = 0; n < s.padded; n += lanes<T>)
    store(s.first_m + n, decay_minus_one<T>(load_part(a + n, r.heads.N - n)));
  read_values(s, r.v, h, t0, steps, P, s.v);
  read_values(s, r.output, h, t0, steps, P, s.g);
  if (r.adjoint()) gradients_of_values(s, delta);
  if (r.of_v)
    for (int64_t i = 0; i < steps; ++i)
      for (int64_t p = 0; p < P; p += lanes<T>)
        store_part(r.of_v.at(t0 + i, h) + p, load(s.of_v + i * s.columns + p), P - p);

  multiply_values(s, s.g, s.v, s.gv);
  if (delta) {
    multiply_values(s, s.z, s.v, s.zv);
    multiply_values(s, s.g, found, s.gf);
    multiply_values(s, s.z, found, s.zf);
  }
  if (r.of_query || r.of_log_decay) collect(s, s.g, state, s.from_q);
  if (delta && (r.of_probe || r.of_log_decay)) collect(s, s.z, state, s.from_r);
  if (r.of_key || r.of_log_decay) collect(s, s.v, s.adjoint, s.from_k);
  if (delta && (r.of_erase || r.of_log_decay)) collect(s, found, s.adjoint, s.from_e);
  if (r.of_log_decay) multiply_states(s, state, s.through);
  (delta ? (bonus ? gradients_of_coefficients<true, true, T>
                  : gradients_of_coefficients<true, false, T>)
         : (bonus ? gradients_of_coefficients<false, true, T>
                  : gradients_of_coefficients<false, false, T>))(r, s, h, t0, steps);
  if (r.adjoint())
    write_rows(s, kSteps, s.adjoint, s.g, span.read, delta ? s.z : nullptr, span.find, s.adjoint);
}

template <class T>
static void spans_gradient(const HeadsGradient<T>& r, T* scratch) {
  GradientSpace<T> s(r, scratch);
  const int64_t heads = r.h1 - r.h0;
  for (int64_t k = 0; k < heads * s.segments * s.size; ++k) s.starts[k] = 0;
  for (int64_t k = 0; k < heads * s.size; ++k) s.adjoints[k] = 0;
  auto start_of = [&](int64_t h, int64_t segment) {
    return s.starts + ((h - r.h0) * s.segments + segment) * s.size;
  };
  const int64_t L = r.heads.L, tokens = s.per_segment * kSteps;
  if (r.states())
    for (int64_t segment = 0; segment + 1 < s.segments; ++segment)
      for (int64_t h = r.h0; h < r.h1; ++h) {
        const int64_t end = (segment + 1) * tokens, most = r.heads.erase ? kSteps : kLongSteps;
        const T* state = start_of(h, segment);
        T* const next = start_of(h, segment + 1);
        for (int64_t t0 = segment * tokens; t0 < end; t0 += most) {
          pass_forward(r, s, h, t0, smaller(most, end - t0), state, s.found, next);
          state = next;
        }
      }
  for (int64_t segment = s.segments - 1; segment >= 0; --segment)
    for (int64_t h = r.h0; h < r.h1; ++h) {
      auto state = [&](int64_t span) {
        return span ? s.states + span * s.size : start_of(h, segment);
      };
      auto found = [&](int64_t span) { return s.found + span * kSteps * s.columns; };
      const int64_t first = segment * tokens;
      const int64_t spans = smaller(s.per_segment, s.spans - segment * s.per_segment);
      if (r.states())
        for (int64_t span = 0; span < spans; ++span) {
          const int64_t t0 = first + span * kSteps;
          pass_forward(r, s, h, t0, smaller(kSteps, L - t0), state(span), found(span),
                       s.states + (span + 1) * s.size);
        }
      s.adjoint = s.adjoints + (h - r.h0) * s.size;
      for (int64_t span = spans - 1; span >= 0; --span)
        pass_backward(r, s, h, first + span * kSteps, state(span), found(span));
    }
}
