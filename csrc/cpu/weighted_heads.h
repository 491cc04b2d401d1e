// Rows of the sum over all channels of what the maps of heads carry, where each channel weighs rows
// and columns: out[i][j] = sum over d and k of left[i][d] map(d)[i][t] right[t][d] taps[d][K-1-k]
// columns[j][d] for t = j + k. No includes here (see vec.h).
//
// A span's outputs are some tokens' columns of the maps. They are weighed while they are in the
// cache, by a product over the head's channels for each tap, and added up.

template <class T>
struct WeighedRows {
  const HeadRows<T>& r;
  const HeadWeights<T>& w;
  int64_t padded, stride;  // channels of a head, and rows, in whole vectors and blocks
  T* taps;                 // (K, padded) of one head
  T* left;                 // (blocks, P, kBlock) of one head
  T* sources;              // (K, kLongSteps, padded): what tokens weigh through each tap
  T* sum;                  // (L, stride)
  T* rest;
  int64_t total;

  WeighedRows(const HeadRows<T>& rows, const HeadWeights<T>& weights, T* base)
      : r(rows), w(weights) {
    padded = round_up(w.P, lanes<T>), stride = round_up(r.count, kBlock<T>);
    Parts<T> parts{base};
    taps = parts.take(w.K * padded);
    left = parts.take(stride * w.P);
    sources = parts.take(w.K * kLongSteps * padded);
    sum = parts.take(r.heads.L * stride);
    rest = parts.base + parts.total;
    total = parts.total + wide_scratch(r.heads, 1, r.count);
  }

  void start(int64_t h) {
    const T scale = T(1) / T(w.D);
    for (int64_t c = 0; c < stride; ++c) {
      T* to = left + c / kBlock<T> * w.P * kBlock<T> + c % kBlock<T>;
      const T* from = c < r.count ? w.left + (r.rows[c] - w.first) * w.D + h * w.P : nullptr;
      for (int64_t p = 0; p < w.P; ++p) to[p * kBlock<T>] = from ? from[p] * scale : T(0);
    }
    for (int64_t k = 0; k < w.K; ++k)
      for (int64_t p = 0; p < padded; ++p)
        taps[k * padded + p] =
            p >= w.P ? T(0) : w.taps ? w.taps[(h * w.P + p) * w.K + w.K - 1 - k] : T(1);
  }

  // What tokens [t0, t0 + steps) weigh; nothing where a tap reads before the first token.
  void weigh_tokens(int64_t h, int64_t t0, int64_t steps) {
    for (int64_t k = 0; k < w.K; ++k)
      for (int64_t i = 0; i < round_up(steps, kRows); ++i) {
        const int64_t t = t0 + i, valid = i < steps && t >= k ? w.P : 0;
        T* to = sources + (k * kLongSteps + i) * padded;
        for (int64_t n = 0; n < padded; n += lanes<T>) {
          Vec<T> x = valid ? load(taps + k * padded + n) : Vec<T>{};
          if (w.right) x *= load_part(w.right + t * w.D + h * w.P + n, valid - n);
          if (w.columns) x *= load_part(w.columns + (t - k) * w.D + h * w.P + n, valid - n);
          store(to + n, x);
        }
      }
  }

  // The rows of the sum, turned into columns.
  void finish() {
    const int64_t L = r.heads.L, end = r.count ? r.rows[0] + 1 : 0;
    for (int64_t p = 0; p < r.count; ++p) {
      T* row = w.out + (r.rows[p] - w.first) * L;
      for (int64_t t = end; t < L; ++t) row[t] = 0;
    }
    constexpr int64_t kLine = 16;
    for (int64_t t0 = 0; t0 < end; t0 += kLine)
      for (int64_t p = 0; p < r.count; p += 4) {
        const int64_t steps = smaller(kLine, end - t0);
        const T* from = sum + t0 * stride + p;
        T* to = w.out + (r.rows[p] - w.first) * L + t0;
        if (steps % 4 == 0 && p + 4 <= r.count) {
          turn(from, stride, steps, 4, to, -L);
          continue;
        }
        for (int64_t q = 0; q < smaller(4, r.count - p); ++q)
          for (int64_t i = 0; i < steps; ++i) to[i - q * L] = from[i * stride + q];
      }
  }
};

// sum <- sum + y times the products of kRows tokens' sources with a block's rows, of the tokens
// [begin, end) of these.
template <int V, class T>
NOINLINE void weigh_block(const T* sources, int64_t padded, const T* left, int64_t P, const T* y,
                          int64_t begin, int64_t end, T* sum, int64_t stride) {
  Vec<T> weight[kRows][V] = {};
  multiply_add<V, false>(sources, padded, 1, left, P, weight);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r < begin || r >= end) continue;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      T* at = sum + r * stride + v * lanes<T>;
      store(at, load(at) + load(y + r * kBlock<T> + v * lanes<T>) * weight[r][v]);
    }
  }
}

template <class T>
static int64_t weighted_heads_scratch(const HeadRows<T>& r, const HeadWeights<T>& w) {
  return WeighedRows<T>(r, w, nullptr).total;
}

// The rows of `r` are consecutive tokens, the latest first.
template <class T>
static void weighted_heads(const HeadRows<T>& r, const HeadWeights<T>& w, T* scratch) {
  WeighedRows<T> s(r, w, scratch);
  const int64_t end = r.count ? r.rows[0] + 1 : 0;
  for (int64_t k = 0; k < end * s.stride; ++k) s.sum[k] = 0;
  for (int64_t h = r.h0; h < r.h1; ++h) {
    s.start(h);
    int64_t made = -1;
    run_rows(r, h, s.rest, [&](int64_t, int64_t k, int64_t t0, int64_t steps, const T* y) {
      if (!y) return;
      if (made != t0) s.weigh_tokens(h, t0, steps), made = t0;
      const int64_t c = k * kBlock<T>;
      const auto weigh = r.count - c <= lanes<T> ? weigh_block<1, T> : weigh_block<kColumnVectors, T>;
      for (int64_t i = 0; i < steps; i += kRows)
        for (int64_t tap = 0; tap < w.K; ++tap) {
          const int64_t t = t0 + i - tap;
          weigh(s.sources + (tap * kLongSteps + i) * s.padded, s.padded, s.left + c * w.P, w.P,
                y + i * kBlock<T>, larger(0, -t), smaller(kRows, steps - i),
                s.sum + t * s.stride + c, s.stride);
        }
    });
  }
  s.finish();
}
