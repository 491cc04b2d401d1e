// How far each vector of one token is from the outputs that it is a part of, where vectors are sums
// over maps: out[r] = sum over e of |sum over m of maps[m][r] * values[m][e] - outputs[r][e]|.
// No includes here (see vec.h).

// Some rows and vectors of columns: kRows rows, of which the last may be given several times.
template <class T>
static INLINE void add_distances(const T* maps, const T* values, const T* outputs, int64_t M,
                                 int64_t R, int64_t E, const int64_t* rows, Vec<T>* sums) {
  constexpr int64_t W = lanes<T>;
  Vec<T> part[kRows][kColumnVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kColumnVectors; ++v) part[r][v] = -load(outputs + rows[r] * E + v * W);
  for (int64_t m = 0; m < M; ++m) {
    Vec<T> value[kColumnVectors];
    for (int v = 0; v < kColumnVectors; ++v) value[v] = load(values + m * E + v * W);
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> entry = splat(maps[m * R + rows[r]]);
      for (int v = 0; v < kColumnVectors; ++v) part[r][v] += entry * value[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kColumnVectors; ++v)
      sums[r] += part[r][v] < Vec<T>{} ? -part[r][v] : part[r][v];
}

// One token: maps (M, R), values (M, E), outputs (R, E), out (R) at steps of `step`. Scratch is R
// vectors: columns come first, so that the values of some stay in the cache for all rows.
template <class T>
static void map_distances(const T* maps, const T* values, const T* outputs, int64_t M, int64_t R,
                          int64_t E, T* out, int64_t step, T* scratch) {
  constexpr int64_t W = lanes<T>, width = kColumnVectors * W;
  for (int64_t k = 0; k < R * W; ++k) scratch[k] = 0;
  int64_t e = 0;
  for (; e + width <= E; e += width)
    for (int64_t r0 = 0; r0 < R; r0 += kRows) {
      int64_t rows[kRows];
      for (int r = 0; r < kRows; ++r) rows[r] = smaller(r0 + r, R - 1);
      Vec<T> sums[kRows] = {};
      add_distances(maps, values + e, outputs + e, M, R, E, rows, sums);
      for (int64_t r = 0; r < smaller(kRows, R - r0); ++r) {
        T* sum = scratch + (r0 + r) * W;
        store(sum, load(sum) + sums[r]);
      }
    }
  for (int64_t r = 0; r < R; ++r) {
    T sum = total<T>(load(scratch + r * W));
    for (int64_t k = e; k < E; ++k) {
      T part = -outputs[r * E + k];
      for (int64_t m = 0; m < M; ++m) part += maps[m * R + r] * values[m * E + k];
      sum += part < 0 ? -part : part;
    }
    out[r * step] = sum;
  }
}
