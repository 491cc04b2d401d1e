// Rows of one channel's map times what each token contributes through each tap of a convolution:
// out[r][j] = left[r] * sum over k of rows[r][j + k] * values[k][j + k], for j < columns.
// No includes here (see vec.h).

template <class T>
static void tap_rows(const T* rows, const T* values, int64_t step, int64_t taps, const T* left,
                     int64_t count, int64_t length, int64_t columns, T* out) {
  constexpr int64_t W = lanes<T>;
  for (int64_t r = 0; r < count; ++r, rows += length, out += columns) {
    const T scale = left ? left[r] : T(1);
    int64_t j = 0;
    for (; j + W <= columns && j + W + taps - 1 <= length; j += W) {
      Vec<T> sum = load(rows + j) * load(values + j);
      for (int64_t k = 1; k < taps; ++k)
        sum += load(rows + j + k) * load(values + k * step + j + k);
      store(out + j, sum * scale);
    }
    for (; j < columns; ++j) {
      T sum = 0;
      for (int64_t k = 0; k < smaller(taps, length - j); ++k)
        sum += rows[j + k] * values[k * step + j + k];
      out[j] = sum * scale;
    }
  }
}
