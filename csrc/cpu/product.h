// Products of matrices that fit the caches. No includes here (see vec.h).

// Rows of one head lie apart in memory, each token's on another page, so that the hardware does not
// foresee them. Those that come next are asked for a few lines at a time, between products.
struct Foreseen {
  struct Part {
    const char* data;
    int64_t token, size;  // in bytes
  };
  Part parts[12];
  int64_t tokens = 0, count = 0;    // of each part; of parts
  int64_t part = 0, step = 0, at = 0;

  void start(int64_t of_each) { tokens = of_each, count = part = step = at = 0; }

  template <class X>
  void add(const Rows<X>& rows, int64_t h, int64_t t0, int64_t size) {
    constexpr int64_t bytes = sizeof(X);
    if (rows) parts[count++] = {(const char*)rows.at(t0, h), rows.token * bytes, size * bytes};
  }

  // At most `lines` of them, all of one row.
  INLINE void fetch(int64_t lines) {
    if (part == count) return;
    const Part& own = parts[part];
    const int64_t end = smaller(at + 64 * lines, own.size);
    for (int64_t k = at; k < end; k += 64) __builtin_prefetch(own.data + step * own.token + k, 0, 2);
    at = end;
    if (end < own.size) return;
    at = 0;
    if (++step == tokens) step = 0, ++part;
  }
};

// A matrix whose entry (m, k) is at data[m * row + k * step].
template <class T>
struct Left {
  const T* data;
  int64_t row, step;
};

// to <- start + m start + A B, for kRows rows and V vectors of columns.
template <int V, class T>
INLINE void multiply_tile(Left<T> a, const T* b, int64_t b_row, int64_t begin, int64_t end,
                          const T* start, T m, T* to, int64_t row) {
  Vec<T> sum[kRows][V] = {};
  if (start)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Vec<T> h = load(start + r * row + v * lanes<T>);
        sum[r][v] = h + h * splat(m);
      }
  for (int64_t k = begin; k < end; ++k) {
    Vec<T> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load(b + k * b_row + v * lanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> y = splat(a.data[r * a.row + k * a.step]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += y * x[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(to + r * row + v * lanes<T>, sum[r][v]);
}

// The entries of A that are not zero: all, those with k <= m, those with k >= m.
enum class Entries { all, lower, upper };

// Multiplies all rows of V vectors of columns, tile by tile.
template <int V, class T>
NOINLINE void multiply_panel(Foreseen& next, int64_t rows, int64_t count, Left<T> a,
                             Entries entries, const T* b, int64_t b_row, const T* start, T m, T* to,
                             int64_t row) {
  for (int64_t i = 0; i < rows; i += kRows) {
    const int64_t begin = entries == Entries::upper ? i : 0;
    const int64_t end = entries == Entries::lower ? smaller(count, i + kRows) : count;
    multiply_tile<V>(Left<T>{a.data + i * a.row, a.row, a.step}, b, b_row, begin, end,
                     start ? start + i * row : nullptr, m, to + i * row, row);
    next.fetch((end - begin) / 4);
  }
}

// to <- start + m start + A B, (rows, columns) with a dimension of `count` between; start may be null.
template <class T>
static void multiply(Foreseen& next, int64_t rows, int64_t columns, int64_t count, Left<T> a,
                     Entries entries, const T* b, int64_t b_row, const T* start, T m, T* to,
                     int64_t row) {
  constexpr int64_t W = lanes<T>;
  int64_t c = 0;
  for (; c + 2 * W <= columns; c += 2 * W)
    multiply_panel<2>(next, rows, count, a, entries, b + c, b_row, start ? start + c : nullptr, m,
                      to + c, row);
  if (c < columns)
    multiply_panel<1>(next, rows, count, a, entries, b + c, b_row, start ? start + c : nullptr, m,
                      to + c, row);
}
