// Runs the CUDA kernels on the host, block by block, with a stack for each of a block's threads, and
// compares with the equations in float64. Built and run by csrc/check_cuda.sh; needs no CUDA.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <ucontext.h>
#include <vector>

// ---- as much of CUDA as the kernels use -------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after the other

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
static cudaError_t cudaGetLastError() { return 0; }

static dim3 blockIdx, threadIdx;

// The threads of a block take turns, each until it waits for others: a core does it without locks.
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  bool done = false;
};
static std::vector<Thread> block;
static ucontext_t scheduler;

// Waits until as many threads as take part have come here; those that are done no longer do.
struct Barrier {
  unsigned expected = 0, arrived = 0, round = 0;

  void complete() {
    if (arrived == expected) arrived = 0, ++round;
  }
  void wait() {
    const unsigned mine = round;
    ++arrived;
    complete();
    while (round == mine) swapcontext(&block[threadIdx.x].context, &scheduler);
  }
  void drop() {
    --expected;
    complete();
  }
};
static Barrier block_barrier;
static std::vector<Barrier> warp_barriers;
static double exchanged[1024];

static void __syncthreads() { block_barrier.wait(); }

template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  const unsigned t = threadIdx.x;
  exchanged[t] = double(value);
  __syncthreads();
  const T got = T(exchanged[t % 32 + by < 32 ? t + by : t]);
  __syncthreads();
  return got;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
  const unsigned t = threadIdx.x;
  exchanged[t] = double(value);
  warp_barriers[t / 32].wait();
  const T got = T(exchanged[t ^ by]);
  warp_barriers[t / 32].wait();
  return got;
}

template <class T>
void atomicAdd(T* to, T value) {
  *to += value;
}

static std::function<void()> body;

static void run_thread() {
  const unsigned t = threadIdx.x;
  body();
  warp_barriers[t / 32].drop();
  block_barrier.drop();  // a thread that is done does not block the others
  block[t].done = true;
}

template <class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, unsigned threads, const Arguments&... arguments) {
  body = [&] { kernel(arguments...); };
  block.resize(std::max<size_t>(block.size(), threads));
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        block_barrier = {threads};
        warp_barriers.clear();
        for (unsigned t = 0; t < threads; t += 32)
          warp_barriers.push_back({std::min(32u, threads - t)});
        for (unsigned t = 0; t < threads; ++t) {
          Thread& thread = block[t];
          getcontext(&thread.context);
          thread.context.uc_stack.ss_sp = thread.stack.data();
          thread.context.uc_stack.ss_size = thread.stack.size();
          thread.context.uc_link = &scheduler;
          makecontext(&thread.context, run_thread, 0);
          thread.done = false;
        }
        for (bool all_done = false; !all_done;) {
          all_done = true;
          for (unsigned t = 0; t < threads; ++t) {
            if (block[t].done) continue;
            all_done = false;
            threadIdx = dim3(t);
            swapcontext(&scheduler, &block[t].context);
          }
        }
      }
}
#define CAPTUM_SSM_LAUNCH(kernel, grid, threads, stream, ...) \
  launch(kernel, grid, threads, __VA_ARGS__)
#define CAPTUM_SSM_EMULATED

#include "diagonal_gradient.cuh"
#include "linear_attention.cuh"
#include "linear_attention_gradient.cuh"
#include "matrix.cuh"
#include "recurrence.cuh"
#include "rows.cuh"
#include "taps.cuh"

// ---- the check --------------------------------------------------------------------------------

using namespace captum_ssm::gpu;

template <class T>
struct Case {
  int64_t batch, L, D, N, G, K;
  bool left;
  std::vector<T> dt, right, A, B, C, gate, conv, columns, input;

  Case(int64_t batch_, int64_t L_, int64_t D_, int64_t N_, int64_t G_, int64_t K_, bool left_)
      : batch(batch_), L(L_), D(D_), N(N_), G(G_), K(K_), left(left_) {
    std::mt19937 g(0);
    std::uniform_real_distribution<double> uniform(0, 1);
    std::normal_distribution<double> normal;
    auto fill = [&](std::vector<T>& v, int64_t count, auto&& f) {
      v.resize(count);
      for (T& x : v) x = T(f());
    };
    fill(dt, batch * L * D, [&] { return 0.3 * uniform(g); });
    for (int64_t i = 70; i < L; i += 71) dt[i * D] = T(INFINITY);  // resets of channel 0
    fill(right, batch * L * D, [&] { return normal(g); });
    fill(A, D * N, [&] { return -3 * uniform(g); });
    fill(B, batch * L * G * N, [&] { return normal(g); });
    fill(C, batch * L * G * N, [&] { return normal(g); });
    fill(gate, batch * L * D, [&] { return left ? normal(g) : 1; });
    fill(conv, D * std::max<int64_t>(K, 1), [&] { return K ? normal(g) : 1; });
    fill(columns, batch * L * D, [&] { return normal(g); });
    fill(input, batch * L * D, [&] { return normal(g); });
  }

  std::string sizes() const {
    auto s = [](const char* name, int64_t x) { return std::string(name) + std::to_string(x); };
    return s("L=", L) + s(" D=", D) + s(" N=", N) + s(" G=", G) + s(" K=", K);
  }

  Maps<T> maps() const {
    return {dt.data(), right.data(), A.data(), B.data(), C.data(), left ? gate.data() : nullptr,
            K ? conv.data() : nullptr, nullptr, batch, L, D, N, G, std::max<int64_t>(K, 1)};
  }

  // (L, L) of one channel, with the convolution or without.
  std::vector<double> matrix(int64_t b, int64_t d, bool taps) const {
    std::vector<double> plain(L * L, 0), out(L * L, 0);
    for (int64_t j = 0; j < L; ++j)
      for (int64_t n = 0; n < N; ++n) {
        const int64_t g = d / (D / G);
        double h = double(B[((b * L + j) * G + g) * N + n]) * right[(b * L + j) * D + d];
        for (int64_t i = j; i < L; ++i) {
          if (i > j) h *= std::exp(A[d * N + n] * std::min(1e30, double(dt[(b * L + i) * D + d])));
          plain[i * L + j] += C[((b * L + i) * G + g) * N + n] * h * gate[(b * L + i) * D + d];
        }
      }
    if (!taps || !K) return plain;
    for (int64_t i = 0; i < L; ++i)
      for (int64_t s = 0; s <= i; ++s)
        for (int64_t j = std::max<int64_t>(0, s - K + 1); j <= s; ++j)
          out[i * L + j] += plain[i * L + s] * conv[d * K + K - 1 - (s - j)];
    return out;
  }
};

static int failures = 0;

template <class T>
void compare(const char* name, const std::string& sizes, const std::vector<T>& actual,
             const std::vector<double>& expected) {
  double error = 0, largest = 0;
  for (size_t k = 0; k < expected.size(); ++k) {
    error = std::max(error, std::isfinite(actual[k]) ? std::abs(actual[k] - expected[k]) : 1e300);
    largest = std::max(largest, std::abs(expected[k]));
  }
  const bool good = error <= (sizeof(T) == 4 ? 3e-6 : 1e-12) * largest;
  failures += !good;
  std::printf("%-8s %s %s: %.1e%s\n", name, sizeof(T) == 4 ? "f32" : "f64", sizes.c_str(),
              error / largest, good ? "" : "  WRONG");
}

template <class T>
void check(const Case<T>& c) {
  const int64_t batch = c.batch, L = c.L, D = c.D;
  std::vector<std::vector<double>> plain, full;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t d = 0; d < D; ++d)
      plain.push_back(c.matrix(b, d, false)), full.push_back(c.matrix(b, d, true));

  for (bool backward : {false, true})
    for (bool mean : {false, true}) {
      if (mean && !backward) continue;
      Run<T> r{c.maps(), backward, false, c.input.data()};
      if (!backward) r.maps.conv = nullptr;
      std::vector<T> out(batch * L * D), sums(channel_blocks(D) * batch * L), row(batch * L);
      std::vector<T> state(batch * r.maps.chunks() * c.N * D), elapsed(batch * r.maps.chunks() * D);
      r.output = mean ? nullptr : out.data();
      r.partial = mean ? sums.data() : nullptr;
      r.state = state.data();
      r.elapsed = elapsed.data();
      run(r, mean ? row.data() : nullptr, nullptr);

      std::vector<double> expected(batch * L * D, 0), expected_row(batch * L, 0);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t d = 0; d < D; ++d) {
          const auto& m = (backward ? full : plain)[b * D + d];
          for (int64_t i = 0; i < L; ++i)
            for (int64_t j = 0; j <= i; ++j) {
              const int64_t to = backward ? j : i, from = backward ? i : j;
              const double v = m[i * L + j] * c.input[(b * L + from) * D + d];
              expected[(b * L + to) * D + d] += v;
              expected_row[b * L + to] += v / D;
            }
        }
      if (mean)
        compare("row mean", c.sizes(), row, expected_row);
      else
        compare(backward ? "rmatvec" : "scan", c.sizes(), out, expected);
    }

  for (int part = 0; part < 4; ++part) {
    const bool some = part % 2, columns = part / 2;
    const int64_t start = some ? L / 3 : 0, stop = some ? (2 * L + 2) / 3 : L;
    Maps<T> maps = c.maps();
    if (columns) maps.columns = c.columns.data();
    const int64_t sums = batch * ((stop + kTile - 1) / kTile + 1) * D;
    std::vector<T> before(batch * L * D), after(batch * L * D), out(batch * (stop - start) * L);
    std::vector<double> sum(sums), expected(out.size(), 0);
    std::vector<int> resets(sums);
    mean(Mean<T>{maps, {before.data(), after.data(), sum.data(), resets.data()}, out.data(),
                 start, stop},
         nullptr);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t d = 0; d < D; ++d)
        for (int64_t i = start; i < stop; ++i)
          for (int64_t j = 0; j < L; ++j)
            expected[(b * (stop - start) + i - start) * L + j] +=
                full[b * D + d][i * L + j] / D *
                (columns ? double(c.columns[(b * L + j) * D + d]) : 1.0);
    compare(columns ? "columns" : "mean", c.sizes(), out, expected);
  }

  // The last row, the first, one twice, the others in random order.
  std::vector<int64_t> wanted{L - 1, 0, L / 2, L / 2};
  for (int64_t i = 0; i < std::min<int64_t>(L, 40); ++i) wanted.push_back(i * 37 % L);
  const int64_t R = wanted.size();
  std::vector<int64_t> index;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row : wanted) index.push_back(b % 2 ? L - 1 - row : row);
  std::vector<T> out(batch * D * R * L, T(NAN));
  rows(MatrixRows<T>{c.maps(), index.data(), R, out.data()}, nullptr);
  std::vector<double> expected;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t d = 0; d < D; ++d)
      for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < L; ++j)
          expected.push_back(full[b * D + d][index[b * R + r] * L + j]);
  compare("rows", c.sizes(), out, expected);
}

// The gradients of a scan: all states h, and their gradients s, in float64.
template <class T>
void check_gradient(const Case<T>& c) {
  const int64_t batch = c.batch, L = c.L, D = c.D, N = c.N, G = c.G;
  auto zeros = [](size_t size) { return std::vector<double>(size, 0); };
  auto v = zeros(batch * L * D), dt = v, right = v, left = v;
  auto A = zeros(D * N), B = zeros(batch * L * G * N), C = B;
  std::vector<T> grad(batch * L * D);
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = T(std::cos(double(i)));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t d = 0; d < D; ++d)
      for (int64_t n = 0; n < N; ++n) {
        const double rate = c.A[d * N + n];
        auto token = [&](int64_t t) { return (b * L + t) * D + d; };
        auto key = [&](int64_t t) { return ((b * L + t) * G + d / (D / G)) * N + n; };
        auto step = [&](int64_t t) { return std::min(1e30, double(c.dt[token(t)])); };
        std::vector<double> h(L + 1, 0);
        for (int64_t t = 0; t < L; ++t)
          h[t + 1] = std::exp(rate * step(t)) * h[t] +
                     double(c.B[key(t)]) * c.input[token(t)] * c.right[token(t)];
        double s = 0;
        for (int64_t t = L - 1; t >= 0; --t) {
          const double g = double(grad[token(t)]) * c.gate[token(t)];
          const double decay = std::exp(rate * step(t));
          s += c.C[key(t)] * g;
          v[token(t)] += c.B[key(t)] * s * c.right[token(t)];
          right[token(t)] += c.B[key(t)] * s * c.input[token(t)];
          left[token(t)] += grad[token(t)] * c.C[key(t)] * h[t + 1];
          B[key(t)] += s * c.input[token(t)] * c.right[token(t)];
          C[key(t)] += g * h[t + 1];
          dt[token(t)] += s * decay * h[t] * rate;
          A[d * N + n] += s * decay * h[t] * step(t);
          s *= decay;
        }
      }
  std::vector<T> of_v(v.size()), of_dt(v.size()), of_right(v.size()), of_left(v.size());
  std::vector<T> of_A(A.size()), of_B(B.size()), of_C(C.size());
  Maps<T> maps = c.maps();
  maps.conv = nullptr;
  Run<T> forward{maps, false, false, c.input.data(), nullptr, nullptr, nullptr, nullptr};
  Run<T> backward{maps, true, false, grad.data(), nullptr, nullptr, nullptr, nullptr};
  std::vector<T> starts[2], elapsed[2];
  for (Run<T>* r : {&forward, &backward}) {
    std::vector<T>&s = starts[r->backward], &e = elapsed[r->backward];
    s.assign(batch * maps.chunks() * N * D, T(NAN)), e.assign(batch * maps.chunks() * D, T(NAN));
    r->state = s.data(), r->elapsed = e.data();
  }
  Gradient<T> r{forward,         backward,    of_v.data(), of_dt.data(),  of_right.data(),
                of_A.data(), of_B.data(), of_C.data(), of_left.data()};
  gradient(r, nullptr);
  compare("of v", c.sizes(), of_v, v);
  compare("of dt", c.sizes(), of_dt, dt);
  compare("of right", c.sizes(), of_right, right);
  compare("of left", c.sizes(), of_left, left);
  if (L > 1) compare("of A", c.sizes(), of_A, A);
  compare("of B", c.sizes(), of_B, B);
  compare("of C", c.sizes(), of_C, C);
}

// Matrix-valued states: the recurrence as it is written, in float64, against both directions.
template <class T>
void check_heads(int64_t batch, int64_t L, int64_t H, int64_t N, int64_t P, bool per_key,
                 bool delta, bool bonus) {
  std::mt19937 g(0);
  std::normal_distribution<double> normal;
  auto make = [&](int64_t size, double scale) {
    std::vector<T> v(batch * L * H * size);
    for (T& x : v) x = T(scale * normal(g));
    return v;
  };
  const int64_t A = per_key ? N : 1;
  const double unit = 1 / std::sqrt(double(N));
  const std::vector<T> q = make(N, 1), k = make(N, 1), e = make(N, unit), r = make(N, unit);
  const std::vector<T> u = make(1, 1), v = make(P, 1), w = make(P, 1);
  std::vector<T> a = make(A, 0.1);
  for (size_t i = 0; i < a.size(); ++i) a[i] = i % 71 == 70 ? -T(INFINITY) : -std::abs(a[i]);

  // (L, L) of every head, column by column.
  std::vector<double> matrix(batch * H * L * L, 0), y(v.size(), 0);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t j = 0; j < L; ++j) {
        std::vector<double> s(N, 0);
        for (int64_t t = j; t < L; ++t) {
          const int64_t at = (b * L + t) * H + h;
          const double x = t == j;
          double found = 0, out = bonus ? u[at] * x : 0;
          for (int64_t n = 0; n < N; ++n) {
            if (bonus) out += q[at * N + n] * s[n];
            s[n] *= std::exp(double(a[at * A + (per_key ? n : 0)]));
            found += r[at * N + n] * s[n];
          }
          for (int64_t n = 0; n < N; ++n) {
            if (delta) s[n] -= e[at * N + n] * found;
            s[n] += k[at * N + n] * x;
            if (!bonus) out += q[at * N + n] * s[n];
          }
          matrix[((b * H + h) * L + t) * L + j] = out;
          for (int64_t p = 0; p < P; ++p)
            y[at * P + p] += out * v[((b * L + j) * H + h) * P + p];
        }
      }

  auto of = [&](const std::vector<T>& x, int64_t size) {
    return Rows<T>{x.data(), L * H * size, H * size, size};
  };
  const Rows<T> none{nullptr, 0, 0, 0};
  const Heads<T> heads{of(q, N), of(k, N), of(a, A), delta ? of(e, N) : none,
                       delta ? of(r, N) : none, bonus ? of(u, 1) : none, per_key, batch, L, H, N};
  auto apply = [&](bool backward, const std::vector<T>& in) {
    std::vector<T> out(in.size());
    HeadsRun<T> run_{heads, P, backward, of(in, P), out.data(), nullptr, nullptr};
    std::vector<T> state(run_.states(), T(NAN)), elapsed(run_.sums(), T(NAN));
    run_.state = state.data(), run_.elapsed = elapsed.data();
    run(run_, nullptr);
    return out;
  };
  const std::vector<T> forward = apply(false, v), backward = apply(true, w);
  const std::string sizes = "L=" + std::to_string(L) + " H=" + std::to_string(H) +
                            " N=" + std::to_string(N) + " P=" + std::to_string(P) +
                            (per_key ? " per key" : "") + (delta ? " delta" : "") +
                            (bonus ? " bonus" : "");
  compare("heads", sizes, forward, y);
  std::vector<double> transposed(w.size(), 0);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < L; ++t)
        for (int64_t j = 0; j <= t; ++j)
          for (int64_t p = 0; p < P; ++p)
            transposed[((b * L + j) * H + h) * P + p] +=
                matrix[((b * H + h) * L + t) * L + j] * w[((b * L + t) * H + h) * P + p];
  compare("heads^T", sizes, backward, transposed);

  // The gradients of w . y, token by token from the last one, with the states of all of them.
  auto zeros = [](size_t size) { return std::vector<double>(size, 0); };
  auto of_v = zeros(v.size()), of_q = zeros(q.size()), of_k = of_q, of_e = of_q, of_r = of_q;
  auto of_a = zeros(a.size()), of_u = zeros(u.size());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t p = 0; p < P; ++p) {
        std::vector<std::vector<double>> s(L + 1, zeros(N)), decayed(L, zeros(N));
        std::vector<double> found(L, 0), of_s(N, 0);
        auto token = [&](int64_t t) { return (b * L + t) * H + h; };
        auto step = [&](int64_t t, int64_t n) { return token(t) * A + (per_key ? n : 0); };
        for (int64_t t = 0; t < L; ++t) {
          const int64_t at = token(t);
          for (int64_t n = 0; n < N; ++n) {
            decayed[t][n] = s[t][n] * std::exp(double(a[step(t, n)]));
            found[t] += delta ? r[at * N + n] * decayed[t][n] : 0;
          }
          for (int64_t n = 0; n < N; ++n)
            s[t + 1][n] = decayed[t][n] - (delta ? e[at * N + n] * found[t] : 0) +
                          double(k[at * N + n]) * v[at * P + p];
        }
        for (int64_t t = L - 1; t >= 0; --t) {
          const int64_t at = token(t);
          const double g = w[at * P + p], x = v[at * P + p];
          double z = 0;
          for (int64_t n = 0; n < N; ++n) {
            if (!bonus) of_s[n] += q[at * N + n] * g;
            of_q[at * N + n] += g * s[bonus ? t : t + 1][n];
            of_k[at * N + n] += of_s[n] * x;
            of_v[at * P + p] += of_s[n] * k[at * N + n];
            of_e[at * N + n] -= of_s[n] * found[t];
            z -= of_s[n] * e[at * N + n];
          }
          for (int64_t n = 0; n < N; ++n) {
            if (delta) of_s[n] += z * r[at * N + n];
            of_r[at * N + n] += z * decayed[t][n];
            if (std::isfinite(a[step(t, n)])) of_a[step(t, n)] += of_s[n] * decayed[t][n];
            of_s[n] *= std::exp(double(a[step(t, n)]));
            if (bonus) of_s[n] += q[at * N + n] * g;
          }
          of_u[at] += g * x;
          if (bonus) of_v[at * P + p] += u[at] * g;
        }
      }
  std::vector<T> g_v(v.size()), g_q(q.size()), g_k(q.size()), g_e(q.size()), g_r(q.size());
  std::vector<T> g_a(a.size()), g_u(u.size());
  HeadsRun<T> values{heads, P, false, of(v, P), nullptr, nullptr, nullptr};
  HeadsRun<T> of_outputs{heads, P, true, of(w, P), nullptr, nullptr, nullptr};
  std::vector<T> starts[2], elapsed[2];
  for (HeadsRun<T>* run_ : {&values, &of_outputs}) {
    std::vector<T>&s = starts[run_->backward], &e = elapsed[run_->backward];
    s.assign(run_->states(), T(NAN)), e.assign(run_->sums(), T(NAN));
    run_->state = s.data(), run_->elapsed = e.data();
  }
  HeadsGradient<T> of_all{values,     of_outputs, g_v.data(), g_q.data(), g_k.data(),
                          g_a.data(), g_e.data(), g_r.data(), g_u.data(), nullptr};
  std::vector<T> checkpoints(of_all.states(), T(NAN));
  of_all.checkpoints = checkpoints.data();
  gradient(of_all, nullptr);
  compare("of v", sizes, g_v, of_v);
  compare("of q", sizes, g_q, of_q);
  compare("of k", sizes, g_k, of_k);
  if (L > 1) compare("of a", sizes, g_a, of_a);
  if (delta && L > 1) compare("of e", sizes, g_e, of_e);
  if (delta && L > 1) compare("of r", sizes, g_r, of_r);
  if (bonus) compare("of u", sizes, g_u, of_u);

  std::vector<int64_t> index;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row : {L - 1, int64_t(0), L / 2, L / 2, L / 3}) index.push_back(b % 2 ? L - 1 - row : row);
  const int64_t R = index.size() / batch;
  std::vector<T> some(batch * H * R * L, T(NAN));
  rows(HeadRows<T>{heads, R, index.data(), 0, some.data(), false}, nullptr);
  std::vector<double> expected;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t x = 0; x < R; ++x)
        for (int64_t j = 0; j < L; ++j)
          expected.push_back(matrix[((b * H + h) * L + index[b * R + x]) * L + j]);
  compare("rows", sizes, some, expected);

  const int64_t start = L / 3, stop = (2 * L + 2) / 3;
  std::vector<T> mean(batch * (stop - start) * L, T(0));
  rows(HeadRows<T>{heads, stop - start, nullptr, start, mean.data(), true}, nullptr);
  expected.assign(mean.size(), 0);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = start; i < stop; ++i)
        for (int64_t j = 0; j < L; ++j)
          expected[(b * (stop - start) + i - start) * L + j] += matrix[((b * H + h) * L + i) * L + j] / H;
  compare("mean", sizes, mean, expected);
}

// Rows times what enters through the taps.
template <class T>
void check_taps(int64_t B, int64_t M, int64_t D, int64_t R, int64_t L, int64_t C, int64_t K,
                bool left) {
  std::mt19937 g(0);
  std::normal_distribution<double> normal;
  auto make = [&](int64_t size) {
    std::vector<T> v(size);
    for (T& x : v) x = T(normal(g));
    return v;
  };
  const int64_t stride = D * R * C + 3;
  const std::vector<T> rows = make(B * M * R * L), values = make(K * B * D * L);
  const std::vector<T> scale = make(B * D * R);
  std::vector<T> out(B * stride, T(0));
  tap_rows(TapRows<T>{rows.data(), values.data(), left ? scale.data() : nullptr, B, M, D, R, L, C, K,
                      stride, out.data()},
           nullptr);
  std::vector<double> expected(out.size(), 0);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t d = 0; d < D; ++d)
      for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < C; ++j)
          for (int64_t k = 0; k < K && j + k < L; ++k)
            expected[b * stride + (d * R + r) * C + j] +=
                (left ? double(scale[(b * D + d) * R + r]) : 1) *
                rows[((b * M + d / (D / M)) * R + r) * L + j + k] *
                values[((k * B + b) * D + d) * L + j + k];
  compare("taps", "L=" + std::to_string(L) + " K=" + std::to_string(K), out, expected);
}

int main() {
  check(Case<float>(1, 1, 1, 1, 1, 0, false));
  check(Case<float>(1, 200, 3, 5, 1, 4, true));
  check(Case<double>(2, 65, 4, 18, 2, 3, true));
  check(Case<double>(1, 300, 2, 2, 1, 40, false));
  check(Case<float>(1, 520, 2, 1, 2, 1, true));
  check(Case<float>(1, 40, 150, 2, 2, 3, true));  // more channels than a warp and a block have threads
  check_gradient(Case<float>(1, 1, 1, 1, 1, 0, false));
  check_gradient(Case<double>(2, 65, 4, 18, 2, 0, true));
  check_gradient(Case<float>(1, 40, 150, 2, 2, 0, true));
  check_gradient(Case<float>(1, 100, 64, 17, 2, 0, true));  // channels of a warp that share a group
  check_heads<float>(1, 1, 1, 1, 1, false, false, false);
  check_heads<double>(2, 150, 2, 5, 3, true, false, true);
  check_heads<double>(1, 40, 1, 33, 2, true, true, false);
  check_heads<float>(1, 40, 3, 4, 1, false, true, true);
  check_heads<double>(1, 20, 1, 200, 1, true, true, false);
  check_heads<float>(1, 260, 1, 3, 2, false, false, false);
  check_heads<float>(1, 140, 2, 60, 8, true, false, false);  // columns of a warp that share a head
  check_heads<float>(1, 40, 2, 100, 4, false, true, false);
  check_taps<float>(2, 2, 4, 11, 150, 150, 4, true);
  check_taps<double>(1, 3, 3, 3, 20, 7, 30, false);
  std::printf(failures ? "%d comparisons failed\n" : "all agree\n", failures);
  return failures != 0;
}
