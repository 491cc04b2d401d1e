// The gradients of linear_attention_scan where a head has one decay for all keys: dense products of
// matrices, kChunk tokens at a time. No includes here (see vec.h).
//
// The names are those of linear_attention_gradient.h. Reads and writes are stacked by kind: rows of
// queries and then of probes, rows of keys and then of erased ones, and their values likewise. With
// `decay` from a write to a read of the same chunk,
//   scores = reads writes^T * decay,    products = (values of reads) (values of writes)^T * decay,
// products writes is the gradient of the reads, and products^T reads that of the writes. Where a
// token is erased along its key, as most delta rules do, one row of writes serves both kinds, whose
// values are added up, and the gradient of the values is the negative of z.
//
// Values, and what is solved for, are kept by column: (columns, tokens). The states are kept at the
// start of each chunk of a segment, and computed again for all segments except the last one.

constexpr int64_t kChunk = 32;
constexpr int64_t kSegmentChunkBytes = 32 << 20;  // of what is kept for a segment

template <class T>
struct ChunkSpace {
  int64_t padded, columns;  // N, P in whole vectors and whole micro tiles
  int64_t size;             // of a state: columns * padded
  int64_t kinds, written;   // of reads and of values; of rows of writes
  int64_t chunks, per_segment, segments;
  int64_t tokens, write_tokens;  // kinds * kChunk, written * kChunk
  T m;                      // exp of the log decays of a chunk together, minus 1
  T *steps_m;               // (kChunk) exp(log_decay) - 1
  T *seen, *to_end;         // (tokens), (kChunk): decays up to a read, and from a write on
  T *decay, *decay_by_key;  // (tokens, kChunk) between write and read; that of the last kind, turned
  T *reads, *of_reads;      // (tokens, padded)
  T *writes, *of_writes;    // (write_tokens, padded), (tokens, padded)
  T *reads_by_state;        // (padded, kChunk), of the probes
  T *writes_by_state;       // (padded, write_tokens)
  T *read_values;           // (columns, tokens)
  T *grad;                  // (kChunk, columns), of the output
  T *sum;                   // (columns, kChunk) of the values of both kinds
  T *solved;                // (columns, write_tokens)
  T *scores;                // (tokens, write_tokens)
  T *scores_by_key;         // (write_tokens, kChunk), of the probes
  T *products;              // (tokens, tokens)
  T *inverse;               // (kChunk, kChunk)
  T *crossing, *edges;      // (kChunk, kChunk), (kChunk), see gradient_of_decays
  T *values;                // (chunks of a segment, heads, columns, tokens), of writes
  T *states;                // (chunks of a segment + 1, heads, columns, padded)
  T *starts;                // (segments, heads, columns, padded)
  T *adjoints;              // (heads, columns, padded)
  T *adjoint;               // the one of the head at hand
  Foreseen next;
  int64_t total;

  ChunkSpace(const HeadsGradient<T>& r, T* base) {
    const bool delta = bool(r.heads.erase);
    const auto &key = r.heads.key, &erase = r.heads.erase;
    const bool same = erase.data == key.data && erase.token == key.token && erase.head == key.head;
    padded = heads_padded<T>(r.heads.N);
    columns = round_up(r.P, larger(kRows, lanes<T>));
    size = columns * padded;
    kinds = delta ? 2 : 1;
    written = delta && !same ? 2 : 1;
    tokens = kinds * kChunk, write_tokens = written * kChunk;
    chunks = round_up(r.heads.L, kChunk) / kChunk;
    const int64_t heads = r.h1 - r.h0;
    const int64_t kept = heads * (size + columns * tokens) * int64_t(sizeof(T));
    per_segment = smaller(chunks, larger(8, kSegmentChunkBytes / kept));
    segments = (chunks + per_segment - 1) / per_segment;
    Parts<T> parts{base};
    steps_m = parts.take(kChunk);
    seen = parts.take(tokens);
    to_end = parts.take(kChunk);
    decay = parts.take(tokens * kChunk);
    decay_by_key = parts.take(kChunk * kChunk);
    reads = parts.take(tokens * padded);
    of_reads = parts.take(tokens * padded);
    writes = parts.take(write_tokens * padded);
    of_writes = parts.take(tokens * padded);
    reads_by_state = parts.take(padded * kChunk);
    writes_by_state = parts.take(padded * write_tokens);
    read_values = parts.take(columns * tokens);
    grad = parts.take(kChunk * columns);
    sum = parts.take(columns * kChunk);
    solved = parts.take(columns * write_tokens);
    scores = parts.take(tokens * write_tokens);
    scores_by_key = parts.take(write_tokens * kChunk);
    products = parts.take(tokens * tokens);
    inverse = parts.take(kChunk * kChunk);
    crossing = parts.take(kChunk * kChunk);
    edges = parts.take(kChunk);
    values = parts.take(per_segment * heads * columns * tokens);
    states = parts.take((per_segment + 1) * heads * size);
    starts = parts.take(segments * heads * size);
    adjoints = parts.take(heads * size);
    total = parts.total;
  }

  // Products, while what comes next is fetched: to <- A B, to <- to + A B, and the same for a state
  // that has decayed over a chunk.
  void set(int64_t rows, int64_t width, int64_t count, Left<T> a, const T* b, int64_t b_row, T* to,
           int64_t to_row) {
    multiply(next, rows, width, count, a, Entries::all, b, b_row, (const T*)nullptr, T(0), to,
             to_row);
  }
  void add(int64_t rows, int64_t width, int64_t count, Left<T> a, const T* b, int64_t b_row, T* to,
           int64_t to_row, Entries entries = Entries::all) {
    multiply(next, rows, width, count, a, entries, b, b_row, (const T*)to, T(0), to, to_row);
  }
  void pass(int64_t rows, int64_t width, int64_t count, Left<T> a, const T* b, int64_t b_row,
            const T* state, T* to) {
    multiply(next, rows, width, count, a, Entries::all, b, b_row, state, m, to, padded);
  }
};

// Rows of a chunk, (kChunk, width); zero for missing tokens.
template <class T>
static void read_chunk(const Rows<const T>& from, int64_t h, int64_t t0, int64_t steps,
                       int64_t count, int64_t width, T* to) {
  for (int64_t i = 0; i < kChunk; ++i)
    copy_row(from.at(t0 + (i < steps ? i : 0), h), i < steps ? count : 0, width, to + i * width);
}

template <class T>
static void write_chunk(const Rows<T>& to, int64_t h, int64_t t0, int64_t steps, int64_t count,
                        const T* from, int64_t row) {
  for (int64_t i = 0; i < steps; ++i) {
    T* own = to.at(t0 + i, h);
    int64_t n = 0;
    for (; n + lanes<T> <= count; n += lanes<T>) store(own + n, load(from + i * row + n));
    if (n < count) store_part(own + n, load(from + i * row + n), count - n);
  }
}

// x[i][k] *= factors[i]
template <class T>
static void scale_rows(const T* factors, int64_t rows, int64_t row, T* x) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t n = 0; n < row; n += lanes<T>)
      store(x + i * row + n, load(x + i * row + n) * splat(factors[i]));
}

// x[p][k] *= factors[k % count]
template <class T>
static void scale_columns(const T* factors, int64_t count, int64_t rows, int64_t row, T* x) {
  for (int64_t p = 0; p < rows; ++p)
    for (int64_t k = 0; k < row; k += count)
      for (int64_t n = 0; n < count; n += lanes<T>)
        store(x + p * row + k + n, load(x + p * row + k + n) * load(factors + n));
}

// x[i][k] *= factors[i][k % kChunk]
template <class T>
static void multiply_entries(const T* factors, int64_t rows, int64_t row, T* x) {
  for (int64_t i = 0; i < rows; ++i)
    scale_columns(factors + i * kChunk, kChunk, 1, row, x + i * row);
}

// The decays of a chunk. Multiplied forward from the token they belong to: see linear_attention.h.
template <class T>
static void read_decays(const HeadsGradient<T>& r, ChunkSpace<T>& s, int64_t h, int64_t t0,
                        int64_t steps) {
  const bool bonus = bool(r.heads.bonus), delta = s.kinds == 2;
  for (int64_t i = 0; i < kChunk; ++i)
    s.steps_m[i] = i < steps ? *r.heads.log_decay.at(t0 + i, h) : T(0);
  for (int64_t i = 0; i < kChunk; i += lanes<T>)
    store(s.steps_m + i, decay_minus_one<T>(load(s.steps_m + i)));

  s.m = 0;
  T through = 1;
  for (int64_t j = 0; j < kChunk; ++j) s.to_end[j] = 0;
  for (int64_t i = 0; i < kChunk; ++i) {
    const T m = s.steps_m[i], before = through;
    T *reads = s.decay + i * kChunk, *probes = s.decay + (kChunk + i) * kChunk;
    if (bonus)
      for (int64_t j = 0; j < kChunk; ++j) reads[j] = s.to_end[j];
    for (int64_t j = 0; j < kChunk; ++j) s.to_end[j] += s.to_end[j] * m;
    if (delta)
      for (int64_t j = 0; j < kChunk; ++j) probes[j] = s.to_end[j];
    s.to_end[i] = 1;
    if (!bonus)
      for (int64_t j = 0; j < kChunk; ++j) reads[j] = s.to_end[j];
    through += through * m;
    s.m = s.m + (m + s.m * m);
    s.seen[i] = bonus ? before : through;
    if (delta) s.seen[kChunk + i] = through;
  }
  if (delta) turn(s.decay + kChunk * kChunk, kChunk, kChunk, kChunk, s.decay_by_key, kChunk);
}

// The negative of (1 + A)^-1, where A has no entries on its diagonal and on one side of it.
template <class T>
static void invert(const T* a, int64_t row, Entries entries, T* to) {
  const bool lower = entries == Entries::lower;
  for (int64_t k = 0; k < kChunk; ++k) {
    const int64_t i = lower ? k : kChunk - 1 - k;
    const int64_t begin = lower ? 0 : i + 1, end = lower ? i : kChunk;
    T* own = to + i * kChunk;
    Vec<T> sums[kChunk / lanes<T>] = {};
    for (int64_t j = begin; j < end; ++j)
      for (int64_t v = 0; v < kChunk / lanes<T>; ++v)
        sums[v] -= splat(a[i * row + j]) * load(to + j * kChunk + v * lanes<T>);
    for (int64_t v = 0; v < kChunk / lanes<T>; ++v) store(own + v * lanes<T>, sums[v]);
    own[i] -= 1;
  }
}

// Zeros for the values of the second kind.
template <class T>
static void clear_last(const ChunkSpace<T>& s, T* values) {
  for (int64_t p = 0; p < s.columns; ++p)
    for (int64_t i = kChunk; i < s.tokens; ++i) values[p * s.tokens + i] = 0;
}

// The values of writes, and the state after a chunk.
template <class T>
static void chunk_forward(const HeadsGradient<T>& r, ChunkSpace<T>& s, int64_t h, int64_t t0,
                          const T* state, T* values, T* next) {
  const Heads<T>& heads = r.heads;
  const int64_t steps = smaller(kChunk, heads.L - t0), padded = s.padded, columns = s.columns;
  read_decays(r, s, h, t0, steps);
  read_chunk(r.v, h, t0, steps, r.P, columns, s.solved);
  turn(s.solved, columns, kChunk, columns, values, s.tokens);
  if (!r.states()) {
    if (s.kinds == 2) clear_last(s, values);
    return;
  }
  read_chunk(heads.key, h, t0, steps, heads.N, padded, s.writes);
  const T* written = values;
  int64_t written_row = s.tokens;
  if (s.kinds == 2) {
    if (s.written == 2)
      read_chunk(heads.erase, h, t0, steps, heads.N, padded, s.writes + kChunk * padded);
    read_chunk(heads.probe, h, t0, steps, heads.N, padded, s.reads);
    turn(s.reads, padded, kChunk, padded, s.reads_by_state, kChunk);
    s.set(s.write_tokens, kChunk, padded, {s.writes, padded, 1}, s.reads_by_state, kChunk,
          s.scores_by_key, kChunk);
    for (int64_t kind = 0; kind < s.written; ++kind)
      multiply_entries(s.decay_by_key, kChunk, kChunk, s.scores_by_key + kind * kChunk * kChunk);
    invert(s.scores_by_key + (s.written - 1) * kChunk * kChunk, kChunk, Entries::upper, s.inverse);
    s.set(columns, kChunk, padded, {state, padded, 1}, s.reads_by_state, kChunk, s.sum, kChunk);
    scale_columns(s.seen + kChunk, kChunk, columns, kChunk, s.sum);
    s.add(columns, kChunk, kChunk, {values, s.tokens, 1}, s.scores_by_key, kChunk, s.sum, kChunk);
    s.set(columns, kChunk, kChunk, {s.sum, kChunk, 1}, s.inverse, kChunk, s.solved, kChunk);
    for (int64_t p = 0; p < columns; ++p)
      for (int64_t i = 0; i < kChunk; i += lanes<T>) {
        const Vec<T> found = load(s.solved + p * kChunk + i);
        store(values + p * s.tokens + kChunk + i, found);
        store(s.sum + p * kChunk + i, found + load(values + p * s.tokens + i));
      }
    if (s.written == 1) written = s.sum, written_row = kChunk;
  }
  for (int64_t kind = 0; kind < s.written; ++kind)
    scale_rows(s.to_end, kChunk, padded, s.writes + kind * kChunk * padded);
  s.pass(columns, padded, s.write_tokens, {written, written_row, 1}, s.writes, padded, state, next);
}

// z, and the gradient of the values.
template <class T>
static void gradients_of_chunk_values(const HeadsGradient<T>& r, ChunkSpace<T>& s, int64_t h,
                                      int64_t t0, int64_t steps) {
  const int64_t columns = s.columns, row = s.write_tokens;
  s.set(columns, row, s.padded, {s.adjoint, s.padded, 1}, s.writes_by_state, row, s.solved, row);
  scale_columns(s.to_end, kChunk, columns, row, s.solved);
  s.add(columns, row, kChunk, {s.read_values, s.tokens, 1}, s.scores, row, s.solved, row);
  const T* of_v = s.solved;
  int64_t of_v_row = row;
  T sign = 1;
  if (s.kinds == 2) {
    const int64_t last = row - kChunk;
    const T* of_probes = s.scores + kChunk * row;
    T* z = s.read_values + kChunk;
    invert(of_probes + last, row, Entries::lower, s.inverse);
    s.set(columns, kChunk, kChunk, {s.solved + last, row, 1}, s.inverse, kChunk, z, s.tokens);
    if (s.written == 1)
      of_v = z, of_v_row = s.tokens, sign = -1;
    else
      s.add(columns, kChunk, kChunk, {z, s.tokens, 1}, of_probes, row, s.solved, row);
  }
  if (!r.of_v) return;
  T* turned = s.sum;
  turn(of_v, of_v_row, columns, kChunk, turned, columns);
  for (int64_t i = 0; i < steps; ++i) {
    const T own = r.heads.bonus ? *r.heads.bonus.at(t0 + i, h) : T(0);
    for (int64_t p = 0; p < columns; ++p)
      turned[i * columns + p] = turned[i * columns + p] * sign + own * s.grad[i * columns + p];
  }
  write_chunk(r.of_v, h, t0, steps, r.P, turned, columns);
}

// The decay of a token is a factor of all that it stands between, whose sum is its gradient:
// crossing[i][j] of the writes of token j that decay last at i, edges[i] of what was before the
// chunk and decays last at i, `after[j]` of the writes of j that are left at the end.
template <class T>
static void gradient_of_decays(const HeadsGradient<T>& r, const ChunkSpace<T>& s, int64_t h,
                               int64_t t0, int64_t steps, const T* after, T through) {
  Vec<T> sums[kChunk / lanes<T>];
  for (int64_t v = 0; v < kChunk / lanes<T>; ++v) sums[v] = load(after + v * lanes<T>);
  T edge = through;
  for (int64_t i = kChunk - 1; i >= 0; --i) {
    Vec<T> sum{};
    for (int64_t v = 0; v < kChunk / lanes<T>; ++v) {
      sums[v] += load(s.crossing + i * kChunk + v * lanes<T>);
      const int64_t before = i - v * lanes<T>;
      if (before > 0) sum += before < lanes<T> ? keep_first<T>(sums[v], before) : sums[v];
    }
    edge += s.edges[i];
    if (i < steps) *r.of_log_decay.at(t0 + i, h) = total<T>(sum) + edge;
  }
}

// What a pass over a chunk reads, and writes.
template <class T>
static void foresee(const HeadsGradient<T>& r, ChunkSpace<T>& s, int64_t h, int64_t t0,
                    bool backward) {
  const Heads<T>& heads = r.heads;
  s.next.start(larger(0, smaller(kChunk, heads.L - t0)));
  if (t0 < 0 || t0 >= heads.L) return;
  s.next.add(heads.key, h, t0, heads.N);
  s.next.add(heads.probe, h, t0, heads.N);
  if (s.written == 2) s.next.add(heads.erase, h, t0, heads.N);
  if (!backward) {
    s.next.add(r.v, h, t0, r.P);
    return;
  }
  s.next.add(heads.query, h, t0, heads.N);
  s.next.add(r.output, h, t0, r.P);
  s.next.add(r.of_v, h, t0, r.P);
  s.next.add(r.of_key, h, t0, heads.N);
  s.next.add(r.of_erase, h, t0, heads.N);
  s.next.add(r.of_query, h, t0, heads.N);
  s.next.add(r.of_probe, h, t0, heads.N);
}

template <class T>
static T dot_states(const ChunkSpace<T>& s, const T* state) {
  Vec<T> sum[4] = {};
  for (int64_t k = 0; k < s.size; k += 4 * lanes<T>)
    for (int64_t v = 0; v < 4; ++v) {
      const int64_t at = k + v * lanes<T>;
      sum[v] += load(state + at) * load(s.adjoint + at);
    }
  return total<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// One chunk of the gradients.
template <class T>
static void chunk_backward(const HeadsGradient<T>& r, ChunkSpace<T>& s, int64_t h, int64_t t0,
                           const T* state, const T* values) {
  const Heads<T>& heads = r.heads;
  const int64_t steps = smaller(kChunk, heads.L - t0), padded = s.padded, columns = s.columns;
  const int64_t tokens = s.tokens, row = s.write_tokens, square = kChunk * padded;
  const bool bonus = bool(heads.bonus), delta = s.kinds == 2;
  read_decays(r, s, h, t0, steps);
  read_chunk(heads.query, h, t0, steps, heads.N, padded, s.reads);
  read_chunk(heads.key, h, t0, steps, heads.N, padded, s.writes);
  if (delta) read_chunk(heads.probe, h, t0, steps, heads.N, padded, s.reads + square);
  if (s.written == 2) read_chunk(heads.erase, h, t0, steps, heads.N, padded, s.writes + square);
  turn(s.writes, padded, row, padded, s.writes_by_state, row);
  s.set(tokens, row, padded, {s.reads, padded, 1}, s.writes_by_state, row, s.scores, row);
  multiply_entries(s.decay, tokens, row, s.scores);
  read_chunk(r.output, h, t0, steps, r.P, columns, s.grad);
  turn(s.grad, columns, kChunk, columns, s.read_values, tokens);
  if (r.adjoint())
    gradients_of_chunk_values(r, s, h, t0, steps);
  else if (delta)
    clear_last(s, s.read_values);

  s.set(tokens, tokens, columns, {s.read_values, 1, tokens}, values, tokens, s.products, tokens);
  if (r.of_bonus)
    for (int64_t i = 0; i < steps; ++i) *r.of_bonus.at(t0 + i, h) = s.products[i * tokens + i];
  if (r.of_log_decay) {
    for (int64_t k = 0; k < kChunk * kChunk; ++k) s.crossing[k] = 0;
    for (int64_t k = 0; k < tokens; ++k) {
      const int64_t i = k % kChunk - (bonus && k < kChunk);
      if (i < 0) continue;
      for (int64_t j = 0; j < tokens; j += lanes<T>) {
        T* to = s.crossing + i * kChunk + j % kChunk;
        store(to, load(to) + load(s.products + k * tokens + j) * load(s.scores + k * row + j % row));
      }
    }
  }
  multiply_entries(s.decay, tokens, tokens, s.products);

  T after[kChunk] = {};
  if (r.of_key || r.of_erase || r.of_log_decay) {
    s.set(tokens, padded, columns, {values, 1, tokens}, s.adjoint, padded, s.of_writes, padded);
    for (int64_t k = 0; k < tokens; ++k) {
      const int64_t j = k % kChunk;
      scale_rows(s.to_end + j, 1, padded, s.of_writes + k * padded);
      after[j] += dot(s.writes + k % row * padded, s.of_writes + k * padded, padded);
    }
    for (int64_t kind = 0; kind < s.kinds; ++kind)
      for (int64_t other = 0; other < s.kinds; ++other) {
        const T* between = s.products + other * kChunk * tokens + kind * kChunk;
        s.add(kChunk, padded, kChunk, {between, 1, tokens}, s.reads + other * square, padded,
              s.of_writes + kind * square, padded, Entries::upper);
      }
    if (r.of_key) write_chunk(r.of_key, h, t0, steps, heads.N, s.of_writes, padded);
    if (r.of_erase) write_chunk(r.of_erase, h, t0, steps, heads.N, s.of_writes + square, padded);
  }
  if (r.of_query || r.of_probe || r.of_log_decay) {
    s.set(tokens, padded, columns, {s.read_values, 1, tokens}, state, padded, s.of_reads, padded);
    for (int64_t i = 0; i < kChunk; ++i) s.edges[i] = 0;
    for (int64_t k = 0; k < tokens; ++k) {
      const int64_t i = k % kChunk - (bonus && k < kChunk);
      scale_rows(s.seen + k, 1, padded, s.of_reads + k * padded);
      if (i >= 0) s.edges[i] += dot(s.reads + k * padded, s.of_reads + k * padded, padded);
    }
    if (s.written < s.kinds)
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t j = 0; j < kChunk; ++j)
          s.products[i * tokens + j] += s.products[i * tokens + kChunk + j];
    for (int64_t kind = 0; kind < s.kinds; ++kind)
      for (int64_t other = 0; other < s.written; ++other) {
        const T* between = s.products + kind * kChunk * tokens + other * kChunk;
        s.add(kChunk, padded, kChunk, {between, tokens, 1}, s.writes + other * square, padded,
              s.of_reads + kind * square, padded, Entries::lower);
      }
    if (r.of_query) write_chunk(r.of_query, h, t0, steps, heads.N, s.of_reads, padded);
    if (r.of_probe) write_chunk(r.of_probe, h, t0, steps, heads.N, s.of_reads + square, padded);
  }
  if (r.of_log_decay)
    gradient_of_decays(r, s, h, t0, steps, after, (1 + s.m) * dot_states(s, state));
  if (r.adjoint()) {
    scale_rows(s.seen, tokens, padded, s.reads);
    s.pass(columns, padded, tokens, {s.read_values, tokens, 1}, s.reads, padded, s.adjoint,
           s.adjoint);
  }
}

template <class T>
static void chunks_gradient(const HeadsGradient<T>& r, T* scratch) {
  ChunkSpace<T> s(r, scratch);
  const int64_t heads = r.h1 - r.h0, all = heads * s.size, values = s.columns * s.tokens;
  for (int64_t k = 0; k < all; ++k) s.starts[k] = s.adjoints[k] = 0;
  auto each = [&](int64_t segment, int64_t c, bool backward, auto pass) {
    const int64_t k = c - segment * s.per_segment;
    for (int64_t h = 0; h < heads; ++h) {
      const bool last = h + 1 == heads;
      foresee(r, s, last ? r.h0 : r.h0 + h + 1, (c + (last ? (backward ? -1 : 1) : 0)) * kChunk,
              backward);
      pass(r.h0 + h, c * kChunk, s.states + k * all + h * s.size,
           s.values + (k * heads + h) * values, h * s.size);
    }
  };
  // Keeps the states and values of a segment, whose first states are given.
  auto forward = [&](int64_t segment) {
    const T* start = s.starts + segment * all;
    for (int64_t k = 0; k < all; ++k) s.states[k] = start[k];
    const int64_t first = segment * s.per_segment;
    for (int64_t c = first; c < smaller(first + s.per_segment, s.chunks); ++c)
      each(segment, c, false, [&](int64_t h, int64_t t0, T* state, T* kept, int64_t) {
        chunk_forward(r, s, h, t0, state, kept, state + all);
      });
  };
  for (int64_t segment = 0; segment + 1 < s.segments; ++segment) {
    forward(segment);
    T* next = s.starts + (segment + 1) * all;
    for (int64_t k = 0; k < all; ++k) next[k] = s.states[s.per_segment * all + k];
  }
  for (int64_t segment = s.segments - 1; segment >= 0; --segment) {
    forward(segment);
    const int64_t first = segment * s.per_segment;
    for (int64_t c = smaller(first + s.per_segment, s.chunks) - 1; c >= first; --c)
      each(segment, c, true, [&](int64_t h, int64_t t0, T* state, T* kept, int64_t at) {
        s.adjoint = s.adjoints + at;
        chunk_backward(r, s, h, t0, state, kept);
      });
  }
}

template <class T>
static int64_t head_gradient_scratch(const HeadsGradient<T>& r) {
  return r.heads.per_key ? spans_gradient_scratch<T>(r) : ChunkSpace<T>(r, (T*)nullptr).total;
}

template <class T>
static void head_gradient(const HeadsGradient<T>& r, T* scratch) {
  r.heads.per_key ? spans_gradient<T>(r, scratch) : chunks_gradient<T>(r, scratch);
}
