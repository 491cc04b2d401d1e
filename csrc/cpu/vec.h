// Vectors of CAPTUM_SSM_VECTOR_BYTES and the exponentials. Compiled once per instruction set, inside
// a namespace of its own: no includes here.

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
template <class T>
INLINE T larger(T a, T b) {
  return a > b ? a : b;
}

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES)));
  typedef float loose
      __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t bits __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES)));
  typedef double loose
      __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t bits __attribute__((vector_size(CAPTUM_SSM_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
constexpr int64_t lanes = CAPTUM_SSM_VECTOR_BYTES / sizeof(T);

template <class T>
constexpr T kLog2e = T(1.44269504088896340736);

template <class T>
INLINE Vec<T> load(const T* p) {
  return (Vec<T>)*(const typename VecOf<T>::loose*)p;
}
template <class T>
INLINE void store(T* p, Vec<T> v) {
  *(typename VecOf<T>::loose*)p = (typename VecOf<T>::loose)v;
}
template <class T>
INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
template <class T, class Join>
INLINE T folded(Vec<T> v, Join join) {
  T part[lanes<T>];
  store(part, v);
  for (int64_t half = lanes<T> / 2; half; half /= 2)
    for (int64_t k = 0; k < half; ++k) part[k] = join(part[k], part[k + half]);
  return part[0];
}
template <class T>
INLINE T total(Vec<T> v) {
#if CAPTUM_SSM_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return _mm512_reduce_add_ps((__m512)v);
  else
    return _mm512_reduce_add_pd((__m512d)v);
#else
  return folded<T>(v, [](T x, T y) { return x + y; });
#endif
}

template <class T>
INLINE T most_of(Vec<T> v) {
#if CAPTUM_SSM_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return _mm512_reduce_max_ps((__m512)v);
  else
    return _mm512_reduce_max_pd((__m512d)v);
#else
  return folded<T>(v, [](T x, T y) { return larger(x, y); });
#endif
}

// The lanes from kBy <= lanes on of two vectors, one after the other.
template <int kBy, class T>
INLINE Vec<T> shifted(Vec<T> v, Vec<T> next) {
#if defined(__clang__)
  Vec<T> out;
  for (int k = 0; k < lanes<T>; ++k)
    out[k] = k + kBy < lanes<T> ? v[k + kBy] : next[k + kBy - lanes<T>];
  return out;
#else
  typename VecOf<T>::bits at;
#pragma GCC unroll 16
  for (int k = 0; k < lanes<T>; ++k) at[k] = k + kBy;
  return __builtin_shuffle(v, next, at);
#endif
}

// q(f) with 2^f = 1 + f q(f) on [-1/2, 1/2]: minimax, to 1e-8 and 2e-17.
INLINE Vec<float> exp2_tail(Vec<float> f) {
  Vec<float> q = splat(1.545316295e-4f);
  q = q * f + 1.339086336e-3f;
  q = q * f + 9.618082557e-3f;
  q = q * f + 5.550357114e-2f;
  q = q * f + 2.402265076e-1f;
  return q * f + 6.931471880e-1f;
}
INLINE Vec<double> exp2_tail(Vec<double> f) {
  Vec<double> q = splat(4.45496059818651839e-10);
  q = q * f + 7.0725859492692237e-9;
  q = q * f + 1.01780624458457735e-7;
  q = q * f + 1.32154428879216897e-6;
  q = q * f + 1.52527338298361184e-5;
  q = q * f + 1.54035304417360502e-4;
  q = q * f + 1.33335581464169353e-3;
  q = q * f + 9.61812910760688853e-3;
  q = q * f + 5.55041086648215943e-2;
  q = q * f + 2.40226506959100982e-1;
  return q * f + 6.93147180559945309e-1;
}

// x = k + f with k whole and |f| <= 1/2; 2^k is applied by scale(). Powers that are no normal
// number become zero.
#if CAPTUM_SSM_VECTOR_BYTES == 64
template <class T>
INLINE Vec<T> bounded(Vec<T> x) {
  return x;
}
template <class T>
INLINE Vec<T> fraction(Vec<T> x) {
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_reduce_ps((__m512)x, 8);
  else
    return (Vec<T>)_mm512_reduce_pd((__m512d)x, 8);
}
template <class T>
INLINE Vec<T> scale(Vec<T> p, Vec<T> k) {
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_scalef_ps((__m512)p, (__m512)k);
  else
    return (Vec<T>)_mm512_scalef_pd((__m512d)p, (__m512d)k);
}
#else
template <class T>
constexpr T kRound = sizeof(T) == 4 ? T(12582912) : T(6755399441055744);  // 1.5 * 2^(mantissa)
template <class T>
constexpr T kLowest = sizeof(T) == 4 ? T(-126) : T(-1022);
template <class T>
INLINE Vec<T> bounded(Vec<T> x) {
  return x < splat(kLowest<T>) ? splat(kLowest<T>) : x;
}
template <class T>
INLINE Vec<T> fraction(Vec<T> x) {
  return x - ((x + kRound<T>)-kRound<T>);
}
template <class T>
INLINE Vec<T> scale(Vec<T> p, Vec<T> k) {
  using Bits = typename VecOf<T>::bits;
  constexpr int mantissa = sizeof(T) == 4 ? 23 : 52;
  // p is in [1/2, 2): the sum of the exponents is a normal one for k > kLowest.
  const Bits whole = (Bits)(k + kRound<T>);
  const Vec<T> scaled = (Vec<T>)((Bits)p + (whole << mantissa));
  return k <= splat(kLowest<T>) ? Vec<T>{} : scaled;
}
#endif

// 2^x for x <= 0, any size; exactly 1 at 0.
template <class T>
INLINE Vec<T> exp2v(Vec<T> x) {
  x = bounded<T>(x);
  const Vec<T> f = fraction<T>(x);
  return scale<T>(f * exp2_tail(f) + 1, x - f);
}

// 2^x - 1 for x <= 0, to full relative precision: h + h * expm1 keeps the decay of a slow state
// exact over thousands of steps, where a rounded decay would drift.
template <class T>
INLINE Vec<T> exp2m1v(Vec<T> x) {
  x = bounded<T>(x);
  const Vec<T> f = fraction<T>(x);
  const Vec<T> power = scale<T>(splat(T(1)), x - f);
  return power * (f * exp2_tail(f)) + (power - 1);
}

// h + h * m in the first `count` lanes, h in the others.
template <class T>
INLINE Vec<T> decay_first(Vec<T> h, Vec<T> m, int64_t count) {
#if CAPTUM_SSM_VECTOR_BYTES == 64
  const unsigned mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_mask_fmadd_ps((__m512)h, (__mmask16)mask, (__m512)m, (__m512)h);
  else
    return (Vec<T>)_mm512_mask_fmadd_pd((__m512d)h, (__mmask8)mask, (__m512d)m, (__m512d)h);
#else
  Vec<T> lane;
  for (int64_t k = 0; k < lanes<T>; ++k) lane[k] = T(k);
  return h + h * (lane < splat(T(count)) ? m : Vec<T>{});
#endif
}

// v in the first `count` lanes, zero in the others.
template <class T>
INLINE Vec<T> keep_first(Vec<T> v, int64_t count) {
  Vec<T> lane;
  for (int64_t k = 0; k < lanes<T>; ++k) lane[k] = T(k);
  return lane < splat(T(count)) ? v : Vec<T>{};
}

// to[c][i] = from[i][c], in squares of four.
template <class T>
NOINLINE void turn(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to,
                   int64_t to_row) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  typedef T Loose __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
  for (int64_t i = 0; i < rows; i += 4)
    for (int64_t c = 0; c < columns; c += 4) {
      Four x[4], even[2], odd[2];
      for (int k = 0; k < 4; ++k) x[k] = (Four) * (const Loose*)(from + (i + k) * from_row + c);
      for (int k = 0; k < 2; ++k) {
        const Four a = x[2 * k], b = x[2 * k + 1];
        even[k] = Four{a[0], b[0], a[2], b[2]};
        odd[k] = Four{a[1], b[1], a[3], b[3]};
      }
      const Four first[2] = {even[0], odd[0]}, second[2] = {even[1], odd[1]};
      for (int k = 0; k < 2; ++k) {
        const Four a = first[k], b = second[k];
        *(Loose*)(to + (c + k) * to_row + i) = (Loose)Four{a[0], a[1], b[0], b[1]};
        *(Loose*)(to + (c + k + 2) * to_row + i) = (Loose)Four{a[2], a[3], b[2], b[3]};
      }
    }
}
