// The operations of diagonal recurrences on CPU tensors: tensors to pointers, the division of the
// work, and the module that registers all operations.
// Schemas, checks of arguments, gradients and shapes for tracing are in captum_ssm/kernels/.

#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

template <class T>
Maps<T> maps(const DiagonalArguments& a, int64_t b) {
  return {a.dt.const_data_ptr<T>() + b * a.L * a.D,
          a.right.const_data_ptr<T>() + b * a.L * a.D,
          a.A.const_data_ptr<T>(),
          a.B.const_data_ptr<T>() + b * a.L * a.G * a.N,
          a.C.const_data_ptr<T>() + b * a.L * a.G * a.N,
          a.left ? a.left->const_data_ptr<T>() + b * a.L * a.D : nullptr,
          data<T>(a.conv),
          a.columns ? a.columns->const_data_ptr<T>() + b * a.L * a.D : nullptr,
          a.L, a.D, a.N, a.G, a.K};
}

// ---- recurrences ----------------------------------------------------------------------------

// How a recurrence is divided: ranges of channels, and chunks of time where there are too few
// channels for the threads. A chunk takes up `overlap` steps before it emits, for the taps.
struct Division {
  int64_t groups, per_group;  // of blocks of channels, `lanes` each
  int64_t chunks, per_chunk;  // of time

  Division(const DiagonalArguments& a, int64_t lanes) {
    const int64_t blocks = up(a.D, lanes), threads = torch::stable::get_num_threads();
    const int64_t wanted = threads > 1 ? up(4 * threads, std::max<int64_t>(1, a.batch)) : 1;
    per_group = up(blocks, std::min(blocks, wanted));
    groups = up(blocks, per_group);
    // A chunked run goes over every step twice, so it pays from three threads on.
    constexpr int64_t kShortest = 1024;
    chunks = threads > 2 && a.batch * groups < threads
                 ? std::max<int64_t>(1, std::min(up(threads, a.batch * groups) * 2, a.L / kShortest))
                 : 1;
    per_chunk = up(a.L, chunks);
    chunks = up(a.L, per_chunk);
  }
};

template <class T>
void recurrence(const DiagonalArguments& a, bool backward, const Tensor& input, T* output, T* mean) {
  const Kernels<T>& k = kernels<T>();
  const Division part(a, k.lanes);
  const int64_t width = part.per_group * k.lanes, overlap = backward && a.conv ? a.K - 1 : 0;
  const int64_t states = width * a.N, units = a.batch * part.groups;
  const bool shared = input.dim() == 2;
  const T* in = input.const_data_ptr<T>();

  auto make = [&](int64_t unit) {
    const int64_t b = unit / part.groups, g = unit % part.groups;
    Run<T> r{};
    r.maps = maps<T>(a, b);
    r.backward = backward;
    r.input = in + b * a.L * (shared ? 1 : a.D);
    r.shared = shared;
    r.d0 = g * width;
    r.d1 = std::min(a.D, r.d0 + width);
    if (!backward) r.maps.conv = nullptr;
    return r;
  };
  const int64_t scratch = k.run_scratch(make(0));

  // State at the start of each chunk: chunk c begins at step c * per_chunk, but its state is that
  // `overlap` steps earlier, so that its first outputs have all the taps.
  Buffer<T> state(units * part.chunks * states);
  std::fill_n(state.get(), units * part.chunks * states, T(0));
  auto begin = [&](int64_t c) { return std::max<int64_t>(0, c * part.per_chunk - overlap); };
  if (part.chunks > 1) {
    Buffer<double> elapsed(units * part.chunks * width);
    std::fill_n(elapsed.get(), units * part.chunks * width, 0.0);
    // What stretch c - 1 adds to the state of chunk c.
    each_task<T>(units * (part.chunks - 1), scratch, [&](int64_t task, T* space) {
      const int64_t unit = task / (part.chunks - 1), c = task % (part.chunks - 1) + 1;
      Run<T> r = make(unit);
      r.state = state.get() + (unit * part.chunks + c) * states;
      r.elapsed = elapsed.get() + (unit * part.chunks + c) * width;
      r.first = begin(c - 1), r.last = begin(c), r.emit = r.last + overlap;
      k.run(r, space);
    });
    each_task<T>(units, 0, [&](int64_t unit, T*) {
      const Run<T> r = make(unit);
      for (int64_t c = 2; c < part.chunks; ++c) {
        T* at = state.get() + (unit * part.chunks + c) * states;
        k.join(r.maps, r.d0, r.d1, elapsed.get() + (unit * part.chunks + c) * width, at - states,
               at);
      }
    });
  }

  // Each range of channels has a row of sums of its own, added up at the end.
  Buffer<T> sums(mean ? units * a.L : 0);
  if (mean) std::fill_n(sums.get(), units * a.L, T(0));
  each_task<T>(units * part.chunks, scratch, [&](int64_t task, T* space) {
    const int64_t unit = task / part.chunks, c = task % part.chunks, b = unit / part.groups;
    Run<T> r = make(unit);
    r.state = state.get() + task * states;
    r.output = output ? output + b * a.L * a.D : nullptr;
    r.sum = mean ? sums.get() + unit * a.L : nullptr;
    r.first = begin(c), r.emit = c * part.per_chunk;
    r.last = std::min(a.L, r.emit + part.per_chunk);
    k.run(r, space);
  });
  if (!mean) return;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t i = 0; i < a.L; ++i) {
      double sum = 0;
      for (int64_t g = 0; g < part.groups; ++g) sum += sums.get()[(b * part.groups + g) * a.L + i];
      mean[b * a.L + i] = T(sum / a.D);
    }
}

Tensor diagonal_scan(const Tensor& v, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& B, const Tensor& C, const std::optional<Tensor>& left) {
  const DiagonalArguments a(dt, right, A, B, C, left, std::nullopt);
  const Tensor in = whole(v, dt, 3);
  STD_TORCH_CHECK(in.numel() == a.dt.numel(), "captum_ssm: v must have the shape of dt");
  Tensor out = torch::stable::new_empty(a.dt, {a.batch, a.L, a.D});
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    recurrence<T>(a, false, in, out.mutable_data_ptr<T>(), nullptr);
  });
  return out;
}

Tensor diagonal_rmatvec(const Tensor& w, const Tensor& dt, const Tensor& right, const Tensor& A,
                        const Tensor& B, const Tensor& C, const std::optional<Tensor>& left,
                        const std::optional<Tensor>& conv, bool mean) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv);
  const Tensor in = whole(w, dt, w.dim() == 2 ? 2 : 3);
  STD_TORCH_CHECK(in.numel() == a.batch * a.L * (w.dim() == 2 ? 1 : a.D),
                  "captum_ssm: w must have the shape of dt, or its first two dimensions");
  Tensor out = mean ? torch::stable::new_empty(a.dt, {a.batch, a.L})
                    : torch::stable::new_empty(a.dt, {a.batch, a.L, a.D});
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    T* p = out.mutable_data_ptr<T>();
    recurrence<T>(a, true, in, mean ? nullptr : p, mean ? p : nullptr);
  });
  return out;
}

// ---- gradients ------------------------------------------------------------------------------

// The gradients of diagonal_scan: those of B and C are summed over ranges of channels, in order.
template <class T>
void scan_gradients(const DiagonalArguments& a, const T* grad, const T* v, RunGradient<T> to) {
  const Kernels<T>& k = kernels<T>();
  const Division part(a, k.lanes);
  const int64_t width = part.per_group * k.lanes, units = a.batch * part.groups;
  auto make = [&](int64_t unit) {
    const int64_t b = unit / part.groups, at = b * a.L * a.D;
    RunGradient<T> r = to;
    r.maps = maps<T>(a, b);
    r.v = v + at, r.output = grad + at;
    r.d0 = unit % part.groups * width, r.d1 = std::min(a.D, r.d0 + width);
    for (T** p : {&r.of_v, &r.of_dt, &r.of_right, &r.of_left})
      if (*p) *p += at;
    return r;
  };
  // Each task has sums of its own, of the groups that it has channels of.
  int64_t groups = 0;
  for (int64_t unit = 0; unit < part.groups; ++unit) groups = std::max(groups, make(unit).groups());
  const int64_t rates = a.D * a.N, sums = a.L * groups * a.N;
  auto zeros = [](bool wanted, int64_t count) {
    Buffer<T> buffer(wanted ? count : 0);
    std::fill_n(buffer.get(), wanted ? count : 0, T(0));
    return buffer;
  };
  const Buffer<T> of_A = zeros(to.of_A, a.batch * rates);
  const Buffer<T> of_B = zeros(to.of_B, units * sums), of_C = zeros(to.of_C, units * sums);

  each_task<T>(units, k.gradient_scratch(make(0)), [&](int64_t unit, T* space) {
    RunGradient<T> r = make(unit);
    if (r.of_A) r.of_A = of_A.get() + unit / part.groups * rates;
    if (r.of_B) r.of_B = of_B.get() + unit * sums;
    if (r.of_C) r.of_C = of_C.get() + unit * sums;
    k.gradient(r, space);
  });

  if (to.of_A)
    for (int64_t x = 0; x < a.batch * rates; ++x) to.of_A[x % rates] += of_A.get()[x];
  each_task<T>(a.batch, 0, [&](int64_t b, T*) {
    for (int64_t unit = b * part.groups; unit < (b + 1) * part.groups; ++unit) {
      const RunGradient<T> r = make(unit);
      const int64_t row = r.groups() * a.N, first = r.maps.group(r.d0) * a.N;
      for (int64_t i = 0; i < a.L; ++i) {
        const int64_t at = (b * a.L + i) * a.G * a.N + first, from = unit * sums + i * row;
        for (int64_t x = 0; x < row; ++x) {
          if (to.of_B) to.of_B[at + x] += of_B.get()[from + x];
          if (to.of_C) to.of_C[at + x] += of_C.get()[from + x];
        }
      }
    }
  });
}

using SevenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SevenTensors diagonal_scan_backward(const Tensor& grad, const Tensor& v, const Tensor& dt,
                                    const Tensor& right, const Tensor& A, const Tensor& B,
                                    const Tensor& C, const std::optional<Tensor>& left,
                                    std::vector<bool> wanted) {
  const DiagonalArguments a(dt, right, A, B, C, left, std::nullopt);
  const Tensor out = whole(grad, dt, 3), in = whole(v, dt, 3);
  STD_TORCH_CHECK(in.numel() == a.dt.numel() && out.numel() == a.dt.numel(),
                  "captum_ssm: grad and v must have the shape of dt");
  Gradients make(a.dt, wanted);
  Tensor of_v = make.next(v), of_dt = make.next(dt), of_right = make.next(right);
  Tensor of_A = make.next(A, true), of_B = make.next(B, true), of_C = make.next(C, true);
  Tensor of_left = make.next(left);
  if (a.batch > 0)
    dispatch(a.dt, [&](auto zero) {
      using T = decltype(zero);
      RunGradient<T> to{};
      to.of_v = if_wanted<T>(of_v), to.of_dt = if_wanted<T>(of_dt);
      to.of_right = if_wanted<T>(of_right), to.of_left = if_wanted<T>(of_left);
      to.of_A = if_wanted<T>(of_A), to.of_B = if_wanted<T>(of_B), to.of_C = if_wanted<T>(of_C);
      scan_gradients<T>(a, out.const_data_ptr<T>(), in.const_data_ptr<T>(), to);
    });
  return {of_v, of_dt, of_right, of_A, of_B, of_C, of_left};
}

// ---- matrices -------------------------------------------------------------------------------

// Sums of dt over stretches of kStretch positions, (batch, stretches, D), for positions below end.
template <class T>
Buffer<double> sums_between(const DiagonalArguments& a, int64_t end) {
  const int64_t stretches = up(end, kStretch);
  Buffer<double> sums(a.batch * stretches * a.D);
  each_task<T>(a.batch * stretches, 0, [&](int64_t task, T*) {
    const int64_t b = task / stretches, first = task % stretches * kStretch;
    const T* dt = a.dt.const_data_ptr<T>() + b * a.L * a.D;
    double* sum = sums.get() + task * a.D;
    std::fill_n(sum, a.D, 0.0);
    for (int64_t i = first; i < std::min(end, first + kStretch); ++i)
      for (int64_t d = 0; d < a.D; ++d) sum[d] += std::min<double>(dt[i * a.D + d], 1e30);
  });
  return sums;
}

// Rows of tiles: [start, stop) cut at multiples of size.
std::vector<std::pair<int64_t, int64_t>> row_tiles(int64_t start, int64_t stop, int64_t size) {
  std::vector<std::pair<int64_t, int64_t>> tiles;
  for (int64_t r = start; r < stop;) {
    const int64_t end = std::min(stop, (r / size + 1) * size);
    tiles.emplace_back(r, end);
    r = end;
  }
  return tiles;
}

// The tiles of one row of tiles, the diagonal one last.
std::vector<Tile> tiles_of(std::pair<int64_t, int64_t> rows, int64_t size) {
  std::vector<Tile> tiles;
  for (int64_t c = 0; c < rows.first; c += size)
    tiles.push_back({rows.first, rows.second, c, std::min(c + size, rows.first)});
  tiles.push_back({rows.first, rows.second, rows.first, rows.second});
  return tiles;
}

// Large tiles waste least; small ones keep all threads busy.
int64_t tile_size(int64_t start, int64_t stop, int64_t batch) {
  const int64_t threads = torch::stable::get_num_threads();
  for (int64_t size = 512; size > 64; size /= 2) {
    int64_t tasks = 0;
    for (const auto& rows : row_tiles(start, stop, size)) tasks += up(rows.first, size) + 1;
    if (tasks * batch >= 4 * threads || (threads == 1 && size <= stop - start)) return size;
  }
  return 64;
}

template <class T>
void mean_rows(const DiagonalArguments& a, int64_t start, int64_t stop, T* out) {
  const Kernels<T>& k = kernels<T>();
  const int64_t size = tile_size(start, stop, a.batch), rows = stop - start;
  const auto strips = row_tiles(start, stop, size);
  struct Task {
    Tile tile;
    int64_t strip;
  };
  std::vector<Task> tasks;
  for (size_t s = 0; s < strips.size(); ++s)
    for (const Tile& t : tiles_of(strips[s], size)) tasks.push_back({t, int64_t(s)});
  // Tiles on the diagonal are the smaller half of the work: they fill the end.
  std::stable_partition(tasks.begin(), tasks.end(),
                        [](const Task& t) { return !t.tile.diagonal(); });

  const Buffer<double> between = sums_between<T>(a, stop);
  const int64_t stretches = up(stop, kStretch);
  std::vector<char> locks(a.batch * strips.size(), 0);
  const bool overlap = a.conv && a.K > 1;
  each_task<T>(a.batch * tasks.size(), k.tile_scratch(maps<T>(a, 0), size),
               [&](int64_t task, T* space) {
                 const int64_t b = task % a.batch;
                 const Task& t = tasks[task / a.batch];
                 char* lock = locks.data() + b * strips.size() + t.strip;
                 k.tile_mean(maps<T>(a, b), t.tile, size, between.get() + b * stretches * a.D,
                             T(1) / T(a.D), out + b * rows * a.L, a.L, start,
                             overlap ? reinterpret_cast<bool*>(lock) : nullptr, space);
               });
}

Tensor diagonal_mean(const Tensor& dt, const Tensor& right, const Tensor& A, const Tensor& B,
                     const Tensor& C, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv, const std::optional<Tensor>& columns,
                     int64_t start, int64_t stop) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv, columns);
  check_range(start, stop, a.L);
  Tensor out = torch::stable::new_zeros(a.dt, {a.batch, stop - start, a.L});
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    mean_rows<T>(a, start, stop, out.mutable_data_ptr<T>());
  });
  return out;
}

template <class T>
void channel_rows(const DiagonalArguments& a, const int64_t* index, int64_t count, T* out) {
  const Kernels<T>& k = kernels<T>();
  constexpr int64_t kSize = 128, kChannels = 16;
  struct Strip {
    int64_t batch;
    std::pair<int64_t, int64_t> rows;
    std::vector<int64_t> wanted, slots;
  };
  std::vector<Strip> strips;
  for (int64_t b = 0; b < a.batch; ++b) {
    std::vector<int64_t> order(count);
    for (int64_t r = 0; r < count; ++r) order[r] = r;
    const int64_t* row = index + b * count;
    std::sort(order.begin(), order.end(),
              [&](int64_t x, int64_t y) { return row[x] < row[y]; });
    for (int64_t slot : order) {
      const int64_t i = row[slot];
      STD_TORCH_CHECK(0 <= i && i < a.L, "captum_ssm: a row asked for is outside the sequence");
      const bool same =
          !strips.empty() && strips.back().batch == b && i < strips.back().rows.first + kSize;
      if (!same) strips.push_back({b, {i, i + 1}, {}, {}});
      strips.back().rows.second = i + 1;
      strips.back().wanted.push_back(i);
      strips.back().slots.push_back(slot);
    }
  }
  const Buffer<double> between = sums_between<T>(a, a.L);
  const int64_t stretches = up(a.L, kStretch), parts = up(a.D, kChannels);
  each_task<T>(strips.size() * parts, k.tile_scratch(maps<T>(a, 0), kSize),
               [&](int64_t task, T* space) {
                 const Strip& s = strips[strips.size() - 1 - task / parts];
                 const int64_t d0 = task % parts * kChannels;
                 for (const Tile& t : tiles_of(s.rows, kSize))
                   k.tile_rows(maps<T>(a, s.batch), t, kSize,
                               between.get() + s.batch * stretches * a.D, d0,
                               std::min(a.D, d0 + kChannels), s.wanted.data(), s.slots.data(),
                               int64_t(s.wanted.size()), out + s.batch * a.D * count * a.L, count,
                               space);
               });
}

Tensor diagonal_rows(const Tensor& index, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& B, const Tensor& C, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv);
  const Tensor rows = row_index(index, a.dt);
  Tensor out = torch::stable::new_empty(a.dt, {a.batch, a.D, rows.size(1), a.L});
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    channel_rows<T>(a, rows.const_data_ptr<int64_t>(), rows.size(1), out.mutable_data_ptr<T>());
  });
  return out;
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CPU, m) {
  m.impl("diagonal_scan", TORCH_BOX(&captum_ssm::diagonal_scan));
  m.impl("diagonal_scan_backward", TORCH_BOX(&captum_ssm::diagonal_scan_backward));
  m.impl("diagonal_rmatvec", TORCH_BOX(&captum_ssm::diagonal_rmatvec));
  m.impl("diagonal_mean", TORCH_BOX(&captum_ssm::diagonal_mean));
  m.impl("diagonal_rows", TORCH_BOX(&captum_ssm::diagonal_rows));
}

#ifndef CAPTUM_SSM_HUB
// The module itself is empty: importing it loads the library, which registers the kernels.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1,      nullptr,
                               nullptr,               nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
#endif
