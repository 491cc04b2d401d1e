// Rows of maps times products of what their rows and columns weigh, summed over maps and taps:
// out[r][j] = sum over m and k of rows[m][r][j + k] * (left[r] . sources[k][j + k]), where the dot
// product is over the channels of map m. No includes here (see vec.h).

constexpr int64_t kWeightedRows = 64;  // rows of a task, whose weights should fit the caches

template <class T>
static int64_t weighted_scratch(int64_t D, int64_t M) {
  return kWeightedRows * D + (D / M + kRows) * kPanel<T>;
}

// The products of kRows rows of weights with a panel of columns, over the channels of one map.
template <class T>
INLINE void weigh(const T* rows, const T* columns, int64_t channels,
                  Vec<T> (&sum)[kRows][kColumnVectors]) {
  for (int64_t p = 0; p < channels; ++p) {
    Vec<T> x[kColumnVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kColumnVectors; ++v)
      x[v] = load(columns + (p * kColumnVectors + v) * lanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> y = splat(rows[p * kRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kColumnVectors; ++v) sum[r][v] += y * x[v];
    }
  }
}

// A panel of `width` columns from c on, of the channels of one map: (channels, kPanel).
template <class T>
INLINE void copy_columns(const T* from, int64_t L, int64_t width, int64_t channels, T* to) {
  for (int64_t p = 0; p < channels; ++p, from += L, to += kPanel<T>) {
    if (width == kPanel<T>) {
      for (int64_t x = 0; x < width; x += lanes<T>) store(to + x, load(from + x));
    } else {
      for (int64_t x = 0; x < kPanel<T>; ++x) to[x] = x < width ? from[x] : T(0);
    }
  }
}

template <class T>
static void weighted_rows(const WeightedRows<T>& w, T* scratch) {
  const int64_t P = w.D / w.M;
  T* const columns = scratch + kWeightedRows * w.D;
  T* const corner = columns + P * kPanel<T>;
  for (int64_t i = 0; i < w.count; i += kRows)  // panels (D, kRows)
    for (int64_t d = 0; d < w.D; ++d)
      for (int64_t r = 0; r < kRows; ++r)
        scratch[i * w.D + d * kRows + r] = i + r < w.count ? w.left[(i + r) * w.D + d] : T(0);
  for (int64_t k = 0; k < w.count * w.L; ++k) w.out[k] = 0;

  for (int64_t c = 0; c < smaller(w.L, w.last + w.count); c += kPanel<T>) {
    const int64_t width = smaller(kPanel<T>, w.L - c);
    for (int64_t m = 0; m < w.M; ++m)
      for (int64_t k = 0; k < smaller(w.K, c + width); ++k) {
        copy_columns(w.sources + k * w.tap_step + m * P * w.L + c, w.L, width, P, columns);
        for (int64_t i = 0; i < w.count; i += kRows) {
          const int64_t count = smaller(kRows, w.count - i);
          if (w.last + i + count - 1 < c) continue;
          Vec<T> sum[kRows][kColumnVectors] = {};
          weigh(scratch + i * w.D + m * P * kRows, columns, P, sum);
          const T* row = w.rows + (m * w.R + i) * w.L + c;
          T* out = w.out + i * w.L + c - k;
          if (count == kRows && width == kPanel<T> && c >= k) {
            for (int r = 0; r < kRows; ++r)
              for (int v = 0; v < kColumnVectors; ++v) {
                const int64_t at = r * w.L + v * lanes<T>;
                store(out + at, load(out + at) + load(row + at) * sum[r][v]);
              }
            continue;
          }
          for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kColumnVectors; ++v)
              store(corner + r * kPanel<T> + v * lanes<T>, sum[r][v]);
          for (int64_t r = 0; r < count; ++r)
            for (int64_t x = larger(0, k - c); x < width; ++x)
              out[r * w.L + x] += row[r * w.L + x] * corner[r * kPanel<T> + x];
        }
      }
  }
}
