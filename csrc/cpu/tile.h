// Tiles of matrices: the channel mean, and rows of every channel. No includes here (see vec.h).
//
// A block of rows right of a boundary b and of sources left of it is a matrix product with inner
// dimension channels times states: exp(A sum(dt[j+1 : i+1])) is exp(A sum(dt[b : i+1])), in the
// rows' panel P with C and left, times exp(A sum(dt[j+1 : b])), in the sources' panel Q with B and
// right. Both are at most 1. Sums of dt are taken over what lies between, in float64, never as
// differences of longer sums, so that a huge step leaves the small ones after it exact. Taps of a
// convolution are folded into Q, which then extends further left.
//
// A tile left of the diagonal is one such block. A tile on the diagonal is halved down to kBase
// rows, where the recurrence itself is run, a vector of columns at a time.
//
// Most states of most models live for a few hundred tokens at most. Between a stretch of sources
// and a stretch of rows, terms are skipped that are too small to change a digit of any entry there:
// below 2^-kFaint of one that is in all of them, by bounds of the factors and by the decays. The
// inner indices of a block are put in the order in which they die with distance, so that what is
// alive between two stretches is a prefix.

constexpr int64_t kBase = 32;  // rows of a triangle that is not halved further; lanes divide it
constexpr int64_t kWorthwhile = 128;  // rows from which on a block looks for states that die
constexpr int64_t kLifetimes = 32;    // classes of them

// The logarithm of the smallest normal number: powers of two below it are zero.
template <class T>
constexpr T kGone = sizeof(T) == 4 ? -126 : -1022;

// The digits of a number, and 12 more for terms that are many.
template <class T>
constexpr T kFaint = sizeof(T) == 4 ? 36 : 65;
template <class T>
constexpr T kNone = T(-1e30);  // the size of nothing

template <class T>
constexpr int64_t kPanel = kColumnVectors * lanes<T>;  // columns of a micro tile

// Scratch of one thread, and where things lie in it.
template <class T>
struct TileScratch {
  int64_t size;      // rows of the largest tile, a multiple of kBase
  int64_t extra;     // columns left of a diagonal tile that its sources reach, in whole vectors
  int64_t stride;    // elements of one channel's positions: size, reach and some padding
  int64_t channels;  // channels handled together
  int64_t inner;     // channels * N
  T* sum;     // panels of columns, (extra + size) / kPanel of (size, kPanel)
  T* P;       // panels of rows, size / kRows of (inner, kRows)
  T* Q;       // panels of columns of (inner, kPanel or lanes)
  T* dt;      // (channels, stride) each
  T* right;
  T* left;
  T* columns; // (channels, width()) factors of the columns, from pad() left of the tile's first on
  T* before;  // sums of dt from the start of the stretch of kBase through the position
  T* after;   // sums of dt beyond the position to the end of its stretch
  T* B;       // (N, stride) of the positions of sources, for one group
  T* C;       // (N, stride) of the positions of rows, for one group
  T* x;       // (stride) exponents of one channel
  T* lines;   // (line()) a state of a panel before its taps are folded in
  T* square;  // (kBase, pitch) a triangle's maps of one channel before its taps are folded in
  T* decay;   // (N, kBase) each: the coefficients of a triangle
  T* leave;
  double* row_stretch;     // (channels, stretches()) sums of dt over stretches of kBase rows
  double* source_stretch;  // the same of sources
  double* gap;             // (channels) sums of dt between a tile's sources and its rows
  double* far;             // (channels) sums of dt from the first source to the last row
  T* left_size;      // (channels, stretches()) the sizes of left, in powers of two
  T* right_size;     // (channels, stretches()) those of right
  T* C_size;         // (stretches(), N)
  T* B_size;         // (stretches(), N)
  T* rates;          // (inner) of decay, in powers of two
  T* row_near;       // (stretches(), inner) the size of a state's factor in the first of the rows,
  T* row_far;        // and in the last one
  T* source_near;    // (stretches(), inner) likewise, the nearest and the farthest of the sources
  T* source_far;
  T* after_slot;     // (inner) a state's slot, plus one
  T* largest;        // (stretches(), stretches()) of rows and sources: a term in all entries
  int32_t* slot;            // (channels, N) position of a state among those in use, or -1
  int32_t* alive;           // (stretches(), stretches()) how many are, by rows and sources
  int64_t used;             // how many states of a block are in use
  int64_t nearest;          // the stretch of sources next to the boundary
  int64_t total;    // elements used

  // What B and C hold: the positions are the tile's, the groups those read last.
  int64_t rows_from, rows_to, sources_from, sources_to;
  int64_t group_B = -1, group_C = -1;

  TileScratch(const Maps<T>& m, int64_t tile, T* base) {
    constexpr int64_t W = lanes<T>;
    size = round_up(tile, kBase);
    extra = round_up(m.reach(), kPanel<T>);
    stride = round_up(size + pad(m.reach()), kBase) + kBase + W;
    channels = larger(1, smaller(m.D, kInner / m.N));
    inner = channels * m.N;
    Parts<T> parts{base};
    sum = parts.take(size * (extra + size));
    P = parts.take(size * inner);
    Q = parts.take((pad(m.reach()) + round_up(size, kPanel<T>)) * inner);
    dt = parts.take(channels * stride);
    right = parts.take(channels * stride);
    left = parts.take(channels * stride);
    columns = parts.take(m.columns ? channels * width(m.reach()) : 0);
    before = parts.take(channels * stride);
    after = parts.take(channels * stride);
    B = parts.take(m.N * stride);
    C = parts.take(m.N * stride);
    x = parts.take(stride);
    lines = parts.take(m.conv ? line(m.reach()) : 0);
    square = parts.take(m.conv ? kBase * pitch(m.reach()) : 0);
    decay = parts.take(m.N * kBase);
    leave = parts.take(m.N * kBase);
    const int64_t per = sizeof(double) / sizeof(T);
    row_stretch = (double*)parts.take(per * channels * stretches());
    source_stretch = (double*)parts.take(per * channels * stretches());
    gap = (double*)parts.take(per * channels);
    far = (double*)parts.take(per * channels);
    left_size = parts.take(channels * stretches());
    right_size = parts.take(channels * stretches());
    C_size = parts.take(stretches() * m.N);
    B_size = parts.take(stretches() * m.N);
    rates = parts.take(whole_inner());
    row_near = parts.take(stretches() * whole_inner());
    row_far = parts.take(stretches() * whole_inner());
    source_near = parts.take(stretches() * whole_inner());
    source_far = parts.take(stretches() * whole_inner());
    after_slot = parts.take(whole_inner());
    largest = parts.take(stretches() * stretches());
    slot = (int32_t*)parts.take(inner);
    alive = (int32_t*)parts.take(stretches() * stretches());
    total = parts.total;
  }
  int64_t pad(int64_t reach) const { return round_up(reach, lanes<T>); }
  int64_t width(int64_t reach) const { return pad(reach) + stride; }
  int64_t pitch(int64_t reach) const { return kBase + 2 * pad(reach); }
  int64_t line(int64_t reach) const { return stride + 2 * round_up(reach, kPanel<T>); }
  int64_t stretches() const { return stride / kBase + 1; }
  int64_t whole_inner() const { return round_up(inner, lanes<T>); }
};

// to[k][i] = from[i][k], zero for positions from `count` up to `padded`.
template <class T>
INLINE void transpose(const T* from, int64_t ld, int64_t count, int64_t padded, int64_t width,
                      T* to, int64_t stride) {
  const int64_t squares = width / 4 * 4, whole = count / 4 * 4;
  turn(from, ld, whole, squares, to, stride);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = i < whole ? squares : 0; k < width; ++k) to[k * stride + i] = from[i * ld + k];
  for (int64_t k = 0; k < width; ++k)
    for (int64_t i = count; i < padded; ++i) to[k * stride + i] = 0;
}

// The size of the largest of `count` numbers: a power of two above it, by its logarithm.
template <class T>
INLINE T size_of(const T* x, int64_t count) {
  typedef typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type Number;
  typedef Number Bits __attribute__((may_alias));
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  Number most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Number bits = ((const Bits*)x)[i] & (Number(-1) >> 1);
    most = bits > most ? bits : most;
  }
  return T(int64_t(most >> kMantissa)) + kGone<T>;
}

// Bounds the steps of four channels from k on (or fewer) in the stretch at b, and sums them.
template <bool rows, bool sources, class T>
static void sum_steps(TileScratch<T>& s, int64_t k, int64_t count, int64_t b) {
  typedef double Sums __attribute__((vector_size(4 * sizeof(double))));
  T steps[4 * kBase] = {}, sums[4 * kBase];
  const int64_t some = smaller(4, count - k), stretch = k * s.stretches() + b / kBase;
  T* dt = s.dt + k * s.stride + b;
  for (int64_t c = 0; c < some; ++c)
    for (int64_t i = 0; i < kBase; ++i) dt[c * s.stride + i] = clamp_step(dt[c * s.stride + i]);
  for (int64_t c = 0; c < some; ++c)
    for (int64_t i = 0; i < kBase; ++i) steps[4 * i + c] = dt[c * s.stride + i];
  auto step = [&](int64_t i) INLINE_LAMBDA {
    const T* x = steps + 4 * i;
    return Sums{double(x[0]), double(x[1]), double(x[2]), double(x[3])};
  };
  auto put = [&](const Sums& sum, int64_t i) INLINE_LAMBDA {
    for (int64_t c = 0; c < 4; ++c) sums[4 * i + c] = T(sum[c]);
  };
  auto keep = [&](T* to) INLINE_LAMBDA {
    if (some == 4) return turn(sums, 4, kBase, 4, to + k * s.stride + b, s.stride);
    for (int64_t c = 0; c < some; ++c)
      for (int64_t i = 0; i < kBase; ++i) to[(k + c) * s.stride + b + i] = sums[4 * i + c];
  };
  Sums all{};
  for (int64_t i = 0; i < kBase; ++i) put(all += step(i), i);
  if (rows) keep(s.before);
  for (int64_t c = 0; c < some; ++c) {
    if (rows) s.row_stretch[stretch + c * s.stretches()] = all[c];
    if (sources) s.source_stretch[stretch + c * s.stretches()] = all[c];
  }
  if (!sources) return;
  Sums later{};
  for (int64_t i = kBase - 1; i >= 0; --i) put(later, i), later += step(i);
  keep(s.after);
}

// Reads positions [p0, p1) of channels [d0, d0 + count), as rows, as sources or as both, and sums
// their steps.
template <bool rows, bool sources, class T>
static void read_positions(const Maps<T>& m, int64_t p0, int64_t p1, int64_t d0, int64_t count,
                           TileScratch<T>& s) {
  const int64_t length = p1 - p0, padded = round_up(length, kBase);
  transpose(m.dt + p0 * m.D + d0, m.D, length, padded, count, s.dt, s.stride);
  if (sources)
    transpose(m.right + p0 * m.D + d0, m.D, length, padded, count, s.right, s.stride);
  if (rows && m.left)
    transpose(m.left + p0 * m.D + d0, m.D, length, padded, count, s.left, s.stride);
  for (int64_t k = 0; k < count; k += 4)
    for (int64_t b = 0; b < padded; b += kBase) sum_steps<rows, sources>(s, k, count, b);
  for (int64_t k = 0; k < count; ++k)
    for (int64_t b = 0; b < padded; b += kBase) {
      const int64_t stretch = k * s.stretches() + b / kBase;
      if (rows) s.left_size[stretch] = m.left ? size_of(s.left + k * s.stride + b, kBase) : 0;
      if (sources) s.right_size[stretch] = size_of(s.right + k * s.stride + b, kBase);
    }
}

// Reads the factors of a tile's columns, and of those that its sources reach to the left of it.
template <class T>
static void read_columns(const Maps<T>& m, const Tile& t, int64_t d0, int64_t count,
                         TileScratch<T>& s) {
  const int64_t stride = s.width(m.reach()), begin = t.c0 - s.pad(m.reach());
  const int64_t first = larger(begin, 0), missing = first - begin;
  for (int64_t k = 0; k < count; ++k)
    for (int64_t x = 0; x < missing; ++x) s.columns[k * stride + x] = 0;
  transpose(m.columns + first * m.D + d0, m.D, t.c1 - first,
            t.c0 + round_up(t.c1 - t.c0, kBase) - first, count, s.columns + missing, stride);
}

// The factors of channel k of the chunk, from the tile's first column on; null where there are none.
template <class T>
INLINE const T* columns_of(const Maps<T>& m, const TileScratch<T>& s, int64_t k) {
  return m.columns ? s.columns + k * s.width(m.reach()) + s.pad(m.reach()) : nullptr;
}

// All states are in use, in their own order, between `rows` rows and `sources` sources.
template <class T>
static void use_all(TileScratch<T>& s, int64_t inner, int64_t rows, int64_t sources) {
  s.used = inner;
  s.nearest = sources / kBase - 1;
  for (int64_t x = 0; x < inner; ++x) s.slot[x] = int32_t(x);
  for (int64_t x = 0; x < rows / kBase * s.stretches(); ++x) s.alive[x] = int32_t(inner);
}

// Has s.B, s.C hold the coefficients of the group of channel d.
template <class T>
INLINE void need_group(const Maps<T>& m, int64_t d, const T* from, int64_t p0, int64_t p1,
                       int64_t stride, int64_t& held, T* to, T* size) {
  const int64_t group = m.group(d);
  if (group == held) return;
  held = group;
  transpose(from + (p0 * m.G + group) * m.N, m.G * m.N, p1 - p0, round_up(p1 - p0, kBase), m.N, to,
            stride);
  for (int64_t b = 0; b < p1 - p0; b += kBase)
    for (int64_t n = 0; n < m.N; ++n)
      size[b / kBase * m.N + n] = size_of(to + n * stride + b, kBase);
}
template <class T>
static void need_B(const Maps<T>& m, TileScratch<T>& s, int64_t d) {
  need_group(m, d, m.B, s.sources_from, s.sources_to, s.stride, s.group_B, s.B, s.B_size);
}
template <class T>
static void need_C(const Maps<T>& m, TileScratch<T>& s, int64_t d) {
  need_group(m, d, m.C, s.rows_from, s.rows_to, s.stride, s.group_C, s.C, s.C_size);
}

// Bounds of the factors of each state in stretches of rows: of the first row, and of the last one.
template <class T>
static void bound_rows(const Maps<T>& m, TileScratch<T>& s, int64_t d0, int64_t count, int64_t r0,
                       int64_t stretches) {
  for (int64_t k = 0; k < count; ++k) {
    need_C(m, s, d0 + k);
    const T* rates = s.rates + k * m.N;
    double sum = 0;
    for (int64_t b = 0; b < stretches; ++b) {
      const int64_t at = k * s.stretches() + r0 + b, to = b * s.whole_inner() + k * m.N;
      const T near = T(sum), far = T(sum += s.row_stretch[at]), left = s.left_size[at];
      const T* C = s.C_size + (r0 + b) * m.N;
      for (int64_t n = 0; n < m.N; ++n) {
        s.row_near[to + n] = C[n] + left + rates[n] * near;
        s.row_far[to + n] = C[n] + left + rates[n] * far;
      }
    }
  }
}

// Bounds of the factors of each state in stretches of columns: of the nearest source, which may be
// one that the taps bring, and of the farthest one.
template <class T>
static void bound_columns(const Maps<T>& m, TileScratch<T>& s, int64_t d0, int64_t count,
                          int64_t c0, int64_t stretches, int64_t sources) {
  const int64_t ahead = round_up(m.reach(), kBase) / kBase;
  for (int64_t k = 0; k < count; ++k) {
    need_B(m, s, d0 + k);
    const T* rates = s.rates + k * m.N;
    const T* columns = columns_of(m, s, k);
    const T taps = m.conv ? size_of(m.conv + (d0 + k) * m.K, m.K) : T(0);
    double sum = s.gap[k], nearest = sum;
    for (int64_t b = sources - 1; b >= 0; --b) {
      const int64_t at = k * s.stretches() + c0 + b, last = smaller(ahead, sources - 1 - b);
      if (b + ahead + 1 < sources) nearest += s.source_stretch[at + ahead + 1];
      sum += s.source_stretch[at];
      if (b >= stretches) continue;
      const int64_t pad = b ? 0 : s.pad(m.reach()), to = b * s.whole_inner() + k * m.N;
      T right = taps + (columns ? size_of(columns + (c0 + b) * kBase - pad, kBase + pad) : 0);
      T most = s.right_size[at];
      for (int64_t x = 1; x <= last; ++x) most = larger(most, s.right_size[at + x]);
      right += most;
      for (int64_t n = 0; n < m.N; ++n) {
        const T* B = s.B_size + (c0 + b) * m.N + n;
        T size = B[0];
        for (int64_t x = 1; x <= last; ++x) size = larger(size, B[x * m.N]);
        s.source_near[to + n] = size + right + rates[n] * T(nearest);
        s.source_far[to + n] = size + right + rates[n] * T(sum);
      }
    }
  }
}

// Puts the states of some channels in the order in which they die, the longest lived first.
template <class T>
static void order_states(const Maps<T>& m, TileScratch<T>& s, int64_t count) {
  int64_t next[kLifetimes + 1] = {};
  for (int64_t x = 0; x < count * m.N; ++x) {
    const double decay = -s.rates[x] * s.far[x / m.N];
    s.slot[x] = decay > kFaint<T> ? int32_t((1 - kFaint<T> / decay) * (kLifetimes - 1)) : 0;
    ++next[s.slot[x] + 1];
  }
  for (int64_t x = 1; x < kLifetimes; ++x) next[x] += next[x - 1];
  for (int64_t x = 0; x < count * m.N; ++x) s.slot[x] = int32_t(next[s.slot[x]]++);
  for (int64_t x = 0; x < s.whole_inner(); ++x)
    s.after_slot[x] = x < count * m.N ? T(s.slot[x] + 1) : T(0);
}

// How many states are in use between a stretch of rows and one of columns.
template <class T>
INLINE int32_t alive_between(TileScratch<T>& s, int64_t r, int64_t c, int64_t inner, T& largest) {
  const T* row = s.row_far + r * s.whole_inner();
  const T* source = s.source_far + c * s.whole_inner();
  Vec<T> most = splat(largest);
  for (int64_t x = 0; x < inner; x += lanes<T>) {
    const Vec<T> size = load(row + x) + load(source + x);
    most = size > most ? size : most;
  }
  largest = most_of<T>(most);
  const Vec<T> limit = splat(larger(largest - kFaint<T>, kGone<T>));
  row = s.row_near + r * s.whole_inner(), source = s.source_near + c * s.whole_inner();
  Vec<T> last{};
  for (int64_t x = 0; x < inner; x += lanes<T>) {
    const Vec<T> slot = load(s.after_slot + x);
    last = load(row + x) + load(source + x) < limit ? last : slot > last ? slot : last;
  }
  return int32_t(most_of<T>(last));
}

// Finds which states of channels [d0, d0 + count) are in use between the rows [r0, r1) and the
// columns [c0, c0 + width), with sources up to c1: positions of the scratch, multiples of kBase,
// with s.gap between them.
template <class T>
static void find_alive(const Maps<T>& m, TileScratch<T>& s, int64_t d0, int64_t count, int64_t r0,
                       int64_t r1, int64_t c0, int64_t c1, int64_t width) {
  const int64_t rows = (r1 - r0) / kBase, sources = (c1 - c0) / kBase, columns = width / kBase;
  const int64_t stretches = s.stretches(), inner = count * m.N;
  s.nearest = sources - 1;
  for (int64_t k = 0; k < count; ++k) {
    s.far[k] = s.gap[k];
    for (int64_t b = 0; b < rows; ++b) s.far[k] += s.row_stretch[k * stretches + r0 / kBase + b];
    for (int64_t b = 0; b < sources; ++b)
      s.far[k] += s.source_stretch[k * stretches + c0 / kBase + b];
  }
  for (int64_t x = 0; x < inner; ++x) s.rates[x] = m.A[d0 * m.N + x] * kLog2e<T>;
  for (int64_t b = 0; b < stretches; ++b)  // what fills the last vector is no term
    for (int64_t x = inner; x < s.whole_inner(); ++x)
      s.row_far[b * s.whole_inner() + x] = s.source_far[b * s.whole_inner() + x] = kNone<T>;
  order_states(m, s, count);
  bound_rows(m, s, d0, count, r0 / kBase, rows);
  bound_columns(m, s, d0, count, c0 / kBase, columns, sources);
  s.used = 0;
  // The farthest first: what is alive there is in use nearer, too.
  for (int64_t r = rows - 1; r >= 0; --r)
    for (int64_t c = 0; c < sources; ++c) {
      int32_t* alive = s.alive + r * stretches + c;
      T* largest = s.largest + (r0 / kBase + r) * stretches + c0 / kBase + c;
      *alive = c < columns ? alive_between(s, r, c, inner, *largest) : 0;
      if (r + 1 < rows) *alive = larger(*alive, alive[stretches]);
      if (c > 0) *alive = larger(*alive, alive[-1]);
      s.used = larger(s.used, *alive);
    }
  for (int64_t x = 0; x < inner; ++x)
    if (s.slot[x] >= s.used) s.slot[x] = -1;
}

template <class T>
INLINE Vec<T> rate(const Maps<T>& m, int64_t d, int64_t n) {
  return splat(m.A[d * m.N + n] * kLog2e<T>);
}

// Puts rows r, r + 1, ... of inner index k in their panels.
template <class T>
INLINE void store_rows(T* P, int64_t inner, int64_t k, int64_t r, Vec<T> v) {
  if constexpr (kRows >= lanes<T>) {
    store(P + r / kRows * inner * kRows + k * kRows + r % kRows, v);
  } else {
    typedef T Part __attribute__((vector_size(kRows * sizeof(T)), aligned(sizeof(T)), may_alias));
    T part[lanes<T>] __attribute__((aligned(64)));
    store(part, v);
#pragma GCC unroll 4
    for (int64_t x = 0; x < lanes<T>; x += kRows)
      *(Part*)(P + (r + x) * inner + k * kRows) = *(const Part*)(part + x);
  }
}

// Rows of P for channel k of the chunk, positions [lo, hi) of the scratch (lo a multiple of kBase),
// with the boundary at lo.
template <class T>
static void rows_panel(const Maps<T>& m, TileScratch<T>& s, int64_t d, int64_t k, int64_t lo,
                       int64_t hi) {
  constexpr int64_t W = lanes<T>;
  need_C(m, s, d);
  const int64_t top = round_up(hi, kBase);
  const T* before = s.before + k * s.stride;
  const T* left = s.left + k * s.stride;
  double sofar = 0;
  for (int64_t b = lo; b < top; b += kBase) {
    const Vec<T> offset = splat(T(sofar));
    for (int64_t i = b; i < b + kBase; i += W) store(s.x + i, offset + load(before + i));
    sofar += s.row_stretch[k * s.stretches() + b / kBase];
  }
  // States run innermost: panels of rows are a power of two apart, and writing to one after the
  // other would hit the same few lines of the cache.
  const T* rates = m.A + d * m.N;
  const int32_t* slot = s.slot + k * m.N;
  for (int64_t i = lo; i < top; i += W) {
    const Vec<T> x = load(s.x + i) * kLog2e<T>;
    const Vec<T> scale = m.left ? load(left + i) : Vec<T>{};
    const int32_t living = s.alive[(i - lo) / kBase * s.stretches() + s.nearest];
    for (int64_t n = 0; n < m.N; ++n) {
      // A slot of -1 is no state in use.
      if (uint32_t(slot[n]) >= uint32_t(living)) continue;
      Vec<T> v = exp2v<T>(splat(rates[n]) * x) * load(s.C + n * s.stride + i);
      if (m.left) v *= scale;
      store_rows(s.P, s.used, slot[n], i - lo, v);
    }
  }
}

// The address of a vector of columns in the sources' panel: `narrow` single vectors come first.
template <class T>
INLINE T* columns_at(TileScratch<T>& s, int64_t narrow, int64_t x) {
  constexpr int64_t W = lanes<T>;
  if (x < narrow * W) return s.Q + x * s.used;
  const int64_t y = x - narrow * W;
  return s.Q + (narrow * W + y / kPanel<T> * kPanel<T>) * s.used + y % kPanel<T>;
}

// The first column, counted from the block's, at which a state in use is alive for any row.
template <class T>
INLINE int64_t first_alive(const TileScratch<T>& s, int32_t slot) {
  int64_t c = s.nearest;
  while (c > 0 && slot < s.alive[c - 1]) --c;
  return c * kBase;
}

// The taps of one channel, applied to a line of sources: column j gathers those of j .. j + reach.
// kReach is the reach of nearly every model's convolution, of width 4, or -1 for any other.
template <int kReach, class T>
struct Taps {
  Vec<T> first[kReach + 2];
  const T* last;
  int64_t reach;

  Taps(const Maps<T>& m, int64_t d) : last(m.conv + d * m.K + m.K - 1), reach(m.K - 1) {
    for (int q = 0; q <= kReach; ++q) first[q] = splat(last[-q]);
  }
  INLINE Vec<T> gather(const T* line) const {
    if constexpr (kReach >= 0) {
      Vec<T> v = first[0] * load(line);
#pragma GCC unroll 8
      for (int q = 1; q <= kReach; ++q) v += first[q] * load(line + q);
      return v;
    }
    Vec<T> v = splat(last[0]) * load(line);
    for (int64_t q = 1; q <= reach; ++q) v += splat(last[-q]) * load(line + q);
    return v;
  }
  // A line that comes in whole vectors: a load across two stores that are under way would stall.
  static constexpr bool kShifts = kReach >= 0 && kReach <= lanes<T>;
  INLINE Vec<T> gather(Vec<T> here, Vec<T> next) const {
    Vec<T> v = first[0] * here;
    if constexpr (kReach > 0) v += first[1] * shifted<1, T>(here, next);
    if constexpr (kReach > 1) v += first[2] * shifted<2, T>(here, next);
    if constexpr (kReach > 2) v += first[3] * shifted<3, T>(here, next);
    static_assert(kReach <= 3);
    return v;
  }
};

// Columns of Q for channel k of the chunk: sources at positions [lo, hi) of the scratch, with the
// boundary s.gap beyond hi. The columns are those of positions [lo - narrow * lanes, lo + width);
// sources from lo + width on only bring their taps.
template <int kReach, class T>
static void columns_panel_of(const Maps<T>& m, TileScratch<T>& s, int64_t d, int64_t k, int64_t lo,
                             int64_t hi, int64_t narrow, int64_t width) {
  constexpr int64_t W = lanes<T>;
  need_B(m, s, d);
  const int64_t top = round_up(hi, kBase), reach = m.reach();
  const T* after = s.after + k * s.stride;
  const T* right = s.right + k * s.stride;
  const int32_t* slot = s.slot + k * m.N;
  double beyond = s.gap[k];
  for (int64_t b = top - kBase; b >= lo; b -= kBase) {
    const Vec<T> offset = splat(T(beyond));
    for (int64_t j = b; j < b + kBase; j += W) store(s.x + j, offset + load(after + j));
    beyond += s.source_stretch[k * s.stretches() + b / kBase];
  }
  if (!m.conv) {
    for (int64_t n = 0; n < m.N; ++n) {
      if (slot[n] < 0) continue;
      const Vec<T> a = rate(m, d, n);
      const T* b = s.B + n * s.stride + lo;
      for (int64_t x = first_alive(s, slot[n]); x < round_up(width, kPanel<T>); x += W)
        store(columns_at(s, 0, x) + slot[n] * kPanel<T>,
              lo + x < top ? exp2v<T>(a * load(s.x + lo + x)) * load(right + lo + x) * load(b + x)
                           : Vec<T>{});
    }
    return;
  }
  const Taps<kReach, T> taps(m, d);
  const int64_t pad = narrow * W, wide = round_up(width, kPanel<T>);
  const T* columns = m.columns ? columns_of(m, s, k) + lo : nullptr;
  for (int64_t n = 0; n < m.N; ++n) {
    if (slot[n] < 0) continue;
    const Vec<T> a = rate(m, d, n);
    const T* b = s.B + n * s.stride + lo;
    const int64_t first = first_alive(s, slot[n]);
    // Sources left of lo and from hi on are none of this block's.
    auto source = [&](int64_t x) INLINE_LAMBDA {
      return x < 0 || x >= top - lo
                 ? Vec<T>{}
                 : exp2v<T>(a * load(s.x + lo + x)) * load(right + lo + x) * load(b + x);
    };
    auto put = [&](int64_t x, Vec<T> v) INLINE_LAMBDA {
      if (columns) v *= load(columns + x);
      store(x < 0 ? s.Q + (x + pad) * s.used + slot[n] * W
                  : columns_at(s, narrow, x + pad) + slot[n] * kPanel<T>, v);
    };
    const int64_t begin = first ? first : -pad;
    if constexpr (Taps<kReach, T>::kShifts) {
      Vec<T> here = source(begin);
      for (int64_t x = begin; x < wide; x += W) {
        const Vec<T> next = source(x + W);
        put(x, taps.gather(here, next));
        here = next;
      }
    } else {
      T* to = s.lines + pad;
      for (int64_t x = begin; x < wide + round_up(reach, W); x += W) store(to + x, source(x));
      for (int64_t x = begin; x < wide; x += W) put(x, taps.gather(to + x));
    }
  }
}

template <class T>
static void columns_panel(const Maps<T>& m, TileScratch<T>& s, int64_t d, int64_t k, int64_t lo,
                          int64_t hi, int64_t narrow, int64_t width) {
  if (!m.conv)
    columns_panel_of<0>(m, s, d, k, lo, hi, narrow, width);
  else if (m.K == 4)
    columns_panel_of<3>(m, s, d, k, lo, hi, narrow, width);
  else
    columns_panel_of<-1>(m, s, d, k, lo, hi, narrow, width);
}

// out[r][c] += sum over k of P[k][r] Q[k][c], for kRows rows and NV vectors of columns, `step`
// elements of Q apart for each k.
template <class V, int NV, class T>
INLINE void micro(const T* P, const T* Q, int64_t step, int64_t inner, T* out) {
  constexpr int64_t W = sizeof(V) / sizeof(T);
  typedef T Loose __attribute__((vector_size(sizeof(V)), aligned(sizeof(T)), may_alias));
  V acc[kRows][NV];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = V{};
  for (int64_t k = 0; k < inner; ++k) {
    V q[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) q[v] = (V) * (const Loose*)(Q + k * step + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V p = P[k * kRows + r] - V{};
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] += p * q[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      Loose* o = (Loose*)(out + r * kPanel<T> + v * W);
      *o = (Loose)((V)*o + acc[r][v]);
    }
}

// Where row r of column x (from `extra` left of the tile's first) is summed.
template <class T>
INLINE T* sum_at(const TileScratch<T>& s, int64_t r, int64_t x) {
  return s.sum + (x / kPanel<T> * s.size + r) * kPanel<T> + x % kPanel<T>;
}

// Multiplies `rows` rows of P with Q, columns from x on, into rows from r on: of each pair of
// stretches the states alive between them. Taps bring sources to the last `reach` of the narrow
// columns.
template <class T>
NOINLINE void product(TileScratch<T>& s, int64_t r, int64_t rows, int64_t x, int64_t reach,
                      int64_t narrow, int64_t width) {
  constexpr int64_t W = lanes<T>;
  static_assert(kBase % kPanel<T> == 0, "a panel of columns lies in one stretch");
  const int64_t stretches = s.stretches();
  typedef T Half __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES / 2)));
  for (int64_t c = 0; c < narrow; ++c)
    for (int64_t i = 0; i < rows; i += kRows)
      if (const int64_t living = s.alive[i / kBase * stretches]) {
        const T* P = s.P + i * s.used;
        const T* Q = s.Q + c * W * s.used;
        T* out = sum_at(s, r + i, x + c * W);
        if (narrow == 1 && reach <= W / 2)
          micro<Half, 1>(P, Q + W / 2, W, living, out + W / 2);
        else
          micro<Vec<T>, 1>(P, Q, W, living, out);
      }
  const T* Q = s.Q + narrow * W * s.used;
  for (int64_t c = 0; c < width; c += kPanel<T>)
    for (int64_t i = 0; i < rows; i += kRows)
      if (const int64_t living = s.alive[i / kBase * stretches + c / kBase])
        micro<Vec<T>, kColumnVectors>(s.P + i * s.used, Q + c * s.used, kPanel<T>, living,
                                      sum_at(s, r + i, x + narrow * W + c));
}

// The recurrence over the kBase rows of a triangle, NB states of it, for the lanes of columns from
// x on. Row i is added to out + i * pitch, or with `own` written to it: the maps of one channel
// before its taps are folded in, zero above the diagonal.
template <int NB, bool own, class T>
INLINE void triangle_states(const TileScratch<T>& s, const T* right, const T* B, int64_t x,
                            int64_t n0, T* out, int64_t pitch) {
  constexpr int64_t W = lanes<T>;
  const T* const decay = s.decay + n0 * kBase;
  const T* const leave = s.leave + n0 * kBase;
  auto read_out = [&](const Vec<T>* h, int64_t i) INLINE_LAMBDA {
    Vec<T> sum[4] = {};
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) sum[n & 3] += h[n] * splat(leave[n * kBase + i]);
    Vec<T> v = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    T* o = out + i * pitch;
    if (own && i < x + W) v = keep_first<T>(v, i - x + 1);
    store(o, own && n0 == 0 ? v : load(o) + v);
  };
  // Every source is there from the start and decays after its row; what stands above the
  // diagonal meanwhile is masked here or never read later.
  Vec<T> h[NB];
#pragma GCC unroll 16
  for (int n = 0; n < NB; ++n) h[n] = load(right + x) * load(B + (n0 + n) * s.stride + x);
  int64_t i = x;
  for (; i < x + W; ++i) {
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n)
      h[n] = decay_first<T>(h[n], splat(decay[n * kBase + i]), i - x);
    read_out(h, i);
  }
  for (; i < kBase; ++i) {
#pragma GCC unroll 16
    for (int n = 0; n < NB; ++n) h[n] += h[n] * splat(decay[n * kBase + i]);
    read_out(h, i);
  }
}

template <bool own, class T>
NOINLINE void triangle_columns(const TileScratch<T>& s, const T* right, const T* B, int64_t x,
                               int64_t states, T* out, int64_t pitch) {
  int64_t n = 0;
  for (; n + kStateBlock <= states; n += kStateBlock)
    triangle_states<kStateBlock, own>(s, right, B, x, n, out, pitch);
  for (; n + 4 <= states; n += 4) triangle_states<4, own>(s, right, B, x, n, out, pitch);
  for (; n < states; ++n) triangle_states<1, own>(s, right, B, x, n, out, pitch);
}

// Folds the taps into a triangle's maps of one channel and adds them to the sum.
template <int kReach, class T>
static void fold_triangle(const Maps<T>& m, const TileScratch<T>& s, int64_t d, int64_t k,
                          int64_t p) {
  constexpr int64_t W = lanes<T>;
  const Taps<kReach, T> taps(m, d);
  const int64_t pitch = s.pitch(m.reach()), pad = s.pad(m.reach());
  const T* columns = columns_of(m, s, k);
  for (int64_t x = -pad; x < kBase; x += W) {
    T* out = sum_at(s, p, s.extra + p + x);
    const Vec<T> factors = columns ? load(columns + p + x) : splat(T(1));
    for (int64_t i = larger(x, 0); i < kBase; ++i) {
      const T* from = s.square + i * pitch + pad + x;
      Vec<T> v;
      if constexpr (Taps<kReach, T>::kShifts)
        v = taps.gather(load(from), load(from + W));
      else
        v = taps.gather(from);
      store(out + i * kPanel<T>, load(out + i * kPanel<T>) + v * factors);
    }
  }
}

// The triangle of the kBase positions from p on, channel k of the chunk.
template <class T>
static void triangle(const Maps<T>& m, TileScratch<T>& s, int64_t d, int64_t k, int64_t p) {
  constexpr int64_t W = lanes<T>;
  need_B(m, s, d);
  need_C(m, s, d);
  const T* dt = s.dt + k * s.stride + p;
  const T* right = s.right + k * s.stride + p;
  const T* left = s.left + k * s.stride + p;
  for (int64_t n = 0; n < m.N; ++n) {
    const Vec<T> a = rate(m, d, n);
    for (int64_t i = 0; i < kBase; i += W) {
      store(s.decay + n * kBase + i, exp2m1v<T>(a * load(dt + i)));
      Vec<T> c = load(s.C + n * s.stride + p + i);
      if (m.left) c *= load(left + i);
      store(s.leave + n * kBase + i, c);
    }
  }
  if (!m.conv) {
    for (int64_t x = 0; x < kBase; x += W)
      triangle_columns<false>(s, right, s.B + p, x, m.N, sum_at(s, p, s.extra + p + x), kPanel<T>);
    return;
  }
  // Sources beyond the triangle's end and before its start are zero in the square.
  const int64_t pitch = s.pitch(m.reach()), pad = s.pad(m.reach());
  for (int64_t x = 0; x < kBase; x += W)
    triangle_columns<true>(s, right, s.B + p, x, m.N, s.square + pad + x, pitch);
  if (m.K == 4)
    fold_triangle<3>(m, s, d, k, p);
  else
    fold_triangle<-1>(m, s, d, k, p);
}

// Positions [lo, hi) of a diagonal tile, both multiples of kBase, halved.
template <class T>
static void halve(const Maps<T>& m, TileScratch<T>& s, int64_t d0, int64_t count, int64_t lo,
                  int64_t hi) {
  if (hi - lo <= kBase) {
    for (int64_t k = 0; k < count; ++k) triangle(m, s, d0 + k, k, lo);
    return;
  }
  int64_t half = kBase;
  while (half * 2 < hi - lo) half *= 2;
  const int64_t middle = lo + half;
  const int64_t narrow = s.pad(m.reach()) / lanes<T>;
  if (half >= kWorthwhile)
    find_alive(m, s, d0, count, middle, hi, lo, middle, half);
  else
    use_all(s, count * m.N, hi - middle, half);
  for (int64_t k = 0; k < count; ++k) {
    rows_panel(m, s, d0 + k, k, middle, hi);
    columns_panel(m, s, d0 + k, k, lo, middle, narrow, half);
  }
  product(s, middle, hi - middle, s.extra + lo - narrow * lanes<T>, m.reach(),
          narrow, half);
  halve(m, s, d0, count, lo, middle);
  halve(m, s, d0, count, middle, hi);
}

// Sums of dt over positions [from, to) of a few channels.
template <class T>
static void sum_between(const Maps<T>& m, const double* between, int64_t from, int64_t to,
                        int64_t d0, int64_t count, double* gap) {
  for (int64_t k = 0; k < count; ++k) gap[k] = 0;
  int64_t i = from;
  while (i < to) {
    if (i % kStretch == 0 && i + kStretch <= to) {
      for (int64_t k = 0; k < count; ++k) gap[k] += between[i / kStretch * m.D + d0 + k];
      i += kStretch;
    } else {
      for (int64_t k = 0; k < count; ++k) gap[k] += clamp_step(m.dt[i * m.D + d0 + k]);
      ++i;
    }
  }
}

template <class T>
static void begin_tile(const Maps<T>& m, TileScratch<T>& s, const Tile& t) {
  s.rows_from = t.r0;
  s.rows_to = t.r1;
  s.sources_from = t.c0;
  s.sources_to = t.diagonal() ? t.c1 : smaller(t.c1 + m.reach(), t.r0);
  s.group_B = s.group_C = -1;
  if (m.conv)
    for (int64_t k = 0; k < kBase * s.pitch(m.reach()); ++k) s.square[k] = 0;
}

template <class T>
static void clear_sum(const TileScratch<T>& s, const Tile& t) {
  const int64_t used = round_up(s.extra + t.c1 - t.c0, kPanel<T>);
  for (int64_t k = 0; k < s.size * used; k += lanes<T>) store(s.sum + k, Vec<T>{});
  for (int64_t k = 0; k < s.stretches() * s.stretches(); ++k) s.largest[k] = kNone<T>;
}

// Adds channels [d0, d0 + count) of a tile to the scratch's sum; all of them fit in one chunk.
template <class T>
static void add_channels(const Maps<T>& m, TileScratch<T>& s, const Tile& t, const double* between,
                         int64_t d0, int64_t count) {
  const int64_t rows = t.r1 - t.r0;
  if (m.columns) read_columns(m, t, d0, count, s);
  if (t.diagonal()) {
    read_positions<true, true>(m, t.r0, t.r1, d0, count, s);
    for (int64_t k = 0; k < count; ++k) s.gap[k] = 0;
    halve(m, s, d0, count, 0, round_up(rows, kBase));
    return;
  }
  const int64_t sources = s.sources_to - s.sources_from;
  read_positions<true, false>(m, t.r0, t.r1, d0, count, s);
  read_positions<false, true>(m, s.sources_from, s.sources_to, d0, count, s);
  sum_between(m, between, s.sources_to, t.r0, d0, count, s.gap);
  find_alive(m, s, d0, count, 0, round_up(rows, kBase), 0, round_up(sources, kBase),
             round_up(t.c1 - t.c0, kBase));
  if (s.used == 0) return;
  for (int64_t k = 0; k < count; ++k) {
    rows_panel(m, s, d0 + k, k, 0, rows);
    columns_panel(m, s, d0 + k, k, 0, sources, 0, t.c1 - t.c0);
  }
  product(s, 0, round_up(rows, kRows), s.extra, 0, 0, t.c1 - t.c0);
}

// Adds one row of the scratch's sum, scaled, to a row of L; or writes it where it is the first
// there, that is in the tile's own columns.
template <bool add, class T>
static void put_row(const TileScratch<T>& s, const Tile& t, int64_t reach, int64_t row, T scale,
                    T* out) {
  constexpr int64_t W = lanes<T>;
  const int64_t r = row - t.r0, last = smaller(t.c1, row + 1);
  if (t.diagonal())
    for (int64_t j = larger(0, t.c0 - reach); j < t.c0; ++j)
      out[j] += scale * *sum_at(s, r, s.extra + j - t.c0);
  int64_t j = t.c0;
  for (; j + W <= last; j += W) {
    const Vec<T> v = scale * load(sum_at(s, r, s.extra + j - t.c0));
    store(out + j, add ? load(out + j) + v : v);
  }
  for (; j < last; ++j) {
    const T v = scale * *sum_at(s, r, s.extra + j - t.c0);
    out[j] = add ? out[j] + v : v;
  }
}

template <class T>
static int64_t tile_scratch(const Maps<T>& m, int64_t size) {
  return TileScratch<T>(m, size, (T*)nullptr).total;
}

template <class T>
static void tile_mean(const Maps<T>& m, const Tile& t, int64_t size, const double* between,
                      T scale, T* out, int64_t ld, int64_t row0, bool* lock, T* scratch) {
  TileScratch<T> s(m, size, scratch);
  begin_tile(m, s, t);
  clear_sum(s, t);
  for (int64_t d = 0; d < m.D; d += s.channels)
    add_channels(m, s, t, between, d, smaller(s.channels, m.D - d));
  if (lock)
    while (__atomic_test_and_set(lock, __ATOMIC_ACQUIRE)) {
    }
  for (int64_t i = t.r0; i < t.r1; ++i)
    put_row<true>(s, t, m.reach(), i, scale, out + (i - row0) * ld);
  if (lock) __atomic_clear(lock, __ATOMIC_RELEASE);
}

template <class T>
static void tile_rows(const Maps<T>& m, const Tile& t, int64_t size, const double* between,
                      int64_t d0, int64_t d1, const int64_t* rows, const int64_t* slots,
                      int64_t count, T* out, int64_t stride, T* scratch) {
  TileScratch<T> s(m, size, scratch);
  begin_tile(m, s, t);
  for (int64_t d = d0; d < d1; ++d) {
    clear_sum(s, t);
    add_channels(m, s, t, between, d, 1);
    for (int64_t k = 0; k < count; ++k) {
      T* row = out + (d * stride + slots[k]) * m.L;
      put_row<false>(s, t, m.reach(), rows[k], T(1), row);
      if (t.diagonal())
        for (int64_t j = rows[k] + 1; j < m.L; ++j) row[j] = 0;
    }
  }
}
