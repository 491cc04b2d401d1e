// The operations of recurrences on a matrix-valued state on CPU tensors: see diagonal.cpp, heads.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

template <class T>
Rows<const T> rows_of(const Tensor& x, int64_t b) {
  return {x.const_data_ptr<T>() + b * x.stride(0), x.stride(1), x.size(2) == 1 ? 0 : x.stride(2)};
}
template <class T>
Rows<const T> rows_of(const std::optional<Tensor>& x, int64_t b) {
  return x ? rows_of<T>(*x, b) : Rows<const T>{};
}

template <class T>
Heads<T> heads(const HeadArguments& a, int64_t b) {
  return {rows_of<T>(a.query, b), rows_of<T>(a.key, b),   rows_of<T>(a.log_decay, b),
          rows_of<T>(a.erase, b), rows_of<T>(a.probe, b), rows_of<T>(a.bonus, b),
          a.L, a.H, a.N, a.log_decay.size(3) > 1};
}

int64_t threads() { return torch::stable::get_num_threads(); }

// Parts that `count` things are divided in, so that all threads have several among `others` tasks.
int64_t per_part(int64_t count, int64_t others) {
  const int64_t wanted = threads() > 1 ? up(4 * threads(), std::max<int64_t>(1, others)) : 1;
  return up(count, std::min(count, wanted));
}

// Few columns: heads are divided, and the time where they are too few for the threads. What a
// stretch of time passes on is only a decay where nothing is erased.
template <class T>
void run_narrow(const HeadArguments& a, bool backward, const Tensor& input, Tensor& out) {
  const HeadsKernels<T>& k = kernels<T>().heads;
  const int64_t P = input.size(3), padded = k.padded(a.N);
  const int64_t per_group = per_part(a.H, a.batch), groups = up(a.H, per_group);
  const int64_t units = a.batch * groups, states = per_group * P * padded;
  constexpr int64_t kShortest = 1024;  // a divided run goes over every step twice
  int64_t chunks = 1;
  if (threads() > 2 && units < threads() && !a.erase)
    chunks = std::max<int64_t>(1, std::min(up(threads(), units) * 2, a.L / kShortest));
  const int64_t per_chunk = up(a.L, chunks);
  chunks = up(a.L, per_chunk);

  Buffer<T> state(units * chunks * states);
  std::fill_n(state.get(), units * chunks * states, T(0));
  auto make = [&](int64_t unit, int64_t c) {
    const int64_t b = unit / groups, h0 = unit % groups * per_group;
    HeadsRun<T> r{heads<T>(a, b), backward, rows_of<T>(input, b)};
    r.P = P;
    r.h0 = h0, r.h1 = std::min(a.H, h0 + per_group);
    r.state = state.get() + (unit * chunks + c) * states;
    return r;
  };
  const int64_t scratch = k.narrow_scratch(make(0, 0));

  if (chunks > 1) {
    const int64_t sums = per_group * padded;
    Buffer<double> elapsed(units * chunks * sums);
    std::fill_n(elapsed.get(), units * chunks * sums, 0.0);
    auto leading_to = [&](int64_t unit, int64_t c) {
      HeadsRun<T> r = make(unit, c);
      r.elapsed = elapsed.get() + (unit * chunks + c) * sums;
      r.first = (c - 1) * per_chunk, r.last = c * per_chunk;
      return r;
    };
    each_task<T>(units * (chunks - 1), scratch, [&](int64_t task, T* space) {
      k.narrow(leading_to(task / (chunks - 1), task % (chunks - 1) + 1), space);
    });
    each_task<T>(units, 0, [&](int64_t unit, T*) {
      for (int64_t c = 2; c < chunks; ++c) {
        const HeadsRun<T> r = leading_to(unit, c);
        k.join(r, r.state - states);
      }
    });
  }
  T* y = out.mutable_data_ptr<T>();
  each_task<T>(units * chunks, scratch, [&](int64_t task, T* space) {
    const int64_t unit = task / chunks, c = task % chunks;
    HeadsRun<T> r = make(unit, c);
    r.output = {y + unit / groups * a.L * a.H * P, a.H * P, P};
    r.first = c * per_chunk, r.last = std::min(a.L, r.first + per_chunk);
    k.narrow(r, space);
  });
}

// The heads and columns of one task: enough tasks for all threads, which have `units` of them
// already, and the state, with `more` numbers for each column, within a processor's own cache.
struct Share {
  int64_t heads, columns;

  template <class T>
  static Share of(const HeadArguments& a, int64_t columns, int64_t most_heads, int64_t units,
                  int64_t more = 0) {
    const HeadsKernels<T>& k = kernels<T>().heads;
    constexpr int64_t kCache = 256 << 10;
    const int64_t cached = std::max<int64_t>(
        1, kCache / ((k.padded(a.N) + more) * k.block * int64_t(sizeof(T))));
    const int64_t blocks = up(columns, k.block);
    const int64_t taken = std::min(per_part(blocks, units), cached);
    const int64_t heads = std::min({per_part(a.H, a.batch * up(blocks, taken)), most_heads,
                                    std::max<int64_t>(1, cached / taken)});
    return {heads, taken * k.block};
  }
};

template <class T>
void run_wide(const HeadArguments& a, bool backward, const Tensor& input, Tensor& out) {
  const HeadsKernels<T>& k = kernels<T>().heads;
  const int64_t P = input.size(3);
  const Share share = Share::of<T>(a, P, kHeadsTogether, a.batch * a.H);
  const int64_t parts = up(P, share.columns), groups = up(a.H, share.heads);
  T* y = out.mutable_data_ptr<T>();
  each_task<T>(a.batch * groups * parts,
               k.wide_scratch(heads<T>(a, 0), share.heads, share.columns),
               [&](int64_t task, T* space) {
                 const int64_t first = task % parts * share.columns, unit = task / parts;
                 const int64_t b = unit / groups;
                 HeadsRun<T> r{heads<T>(a, b), backward, rows_of<T>(input, b)};
                 r.input.data += first;
                 r.output = {y + b * a.L * a.H * P + first, a.H * P, P};
                 r.P = std::min(P - first, share.columns);
                 r.h0 = unit % groups * share.heads, r.h1 = std::min(a.H, r.h0 + share.heads);
                 k.wide(r, space);
               });
}

Tensor run(const HeadArguments& a, bool backward, const Tensor& given) {
  const Tensor input = a.values(given, backward);
  const int64_t P = input.size(3);
  Tensor out = torch::stable::new_empty(a.query, {a.batch, a.L, a.H, P});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    if (P <= kernels<T>().heads.widest_narrow)
      run_narrow<T>(a, backward, input, out);
    else
      run_wide<T>(a, backward, input, out);
  });
  return out;
}

Tensor linear_attention_scan(const Tensor& v, const Tensor& query, const Tensor& key,
                             const Tensor& log_decay, const std::optional<Tensor>& erase,
                             const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus) {
  return run(HeadArguments(query, key, log_decay, erase, probe, bonus), false, v);
}

Tensor linear_attention_rmatvec(const Tensor& w, const Tensor& query, const Tensor& key,
                                const Tensor& log_decay, const std::optional<Tensor>& erase,
                                const std::optional<Tensor>& probe,
                                const std::optional<Tensor>& bonus) {
  return run(HeadArguments(query, key, log_decay, erase, probe, bonus), true, w);
}

using SevenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SevenTensors linear_attention_scan_backward(
    const Tensor& grad, const Tensor& v, const Tensor& query, const Tensor& key,
    const Tensor& log_decay, const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
    const std::optional<Tensor>& bonus, std::vector<bool> wanted) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  const Tensor in = a.values(v, false), output = a.values(grad, false);
  const int64_t P = in.size(3);
  STD_TORCH_CHECK(output.size(3) == P, "captum_ssm: grad must have the shape of v");
  Gradients make(a.query, wanted);
  const bool empty = in.numel() == 0;
  Tensor of_v = make.next(v, empty), of_query = make.next(query, empty);
  Tensor of_key = make.next(key, empty), of_log_decay = make.next(log_decay, empty);
  Tensor of_erase = make.next(erase, empty), of_probe = make.next(probe, empty);
  Tensor of_bonus = make.next(bonus, empty);
  if (!empty)
    dispatch(a.query, [&](auto zero) {
      using T = decltype(zero);
      const HeadsKernels<T>& k = kernels<T>().heads;
      // Heads take turns, so their states should stay in a processor's own cache.
      constexpr int64_t kCache = 256 << 10;
      const int64_t cached = std::max<int64_t>(1, kCache / (k.padded(a.N) * P * int64_t(sizeof(T))));
      const int64_t together = std::min({kHeadsTogether, cached, per_part(a.H, a.batch)});
      const int64_t groups = up(a.H, together);
      auto make_task = [&](int64_t task) {
        const int64_t b = task / groups, h0 = task % groups * together;
        auto to = [&](Tensor& x, int64_t size) {
          T* p = if_wanted<T>(x);
          return p ? Rows<T>{p + b * a.L * a.H * size, a.H * size, size} : Rows<T>{};
        };
        HeadsGradient<T> r{heads<T>(a, b), rows_of<T>(in, b), rows_of<T>(output, b),
                           P, h0, std::min(a.H, h0 + together)};
        r.of_v = to(of_v, P), r.of_query = to(of_query, a.N), r.of_key = to(of_key, a.N);
        r.of_erase = to(of_erase, a.N), r.of_probe = to(of_probe, a.N);
        r.of_log_decay = to(of_log_decay, a.log_decay.size(3)), r.of_bonus = to(of_bonus, 1);
        return r;
      };
      each_task<T>(a.batch * groups, k.gradient_scratch(make_task(0)),
                   [&](int64_t task, T* space) { k.gradient(make_task(task), space); });
    });
  return {of_v, of_query, of_key, of_log_decay, of_erase, of_probe, of_bonus};
}

template <class T>
void head_rows(const HeadArguments& a, const int64_t* index, int64_t count, T* out) {
  const HeadsKernels<T>& k = kernels<T>().heads;
  // Latest rows first: a run enters them in this order.
  std::vector<int64_t> slots(a.batch * count), rows(a.batch * count);
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t* order = slots.data() + b * count;
    const int64_t* row = index + b * count;
    std::iota(order, order + count, 0);
    std::sort(order, order + count, [&](int64_t x, int64_t y) { return row[x] > row[y]; });
    for (int64_t r = 0; r < count; ++r) {
      rows[b * count + r] = row[order[r]];
      STD_TORCH_CHECK(0 <= row[order[r]] && row[order[r]] < a.L,
                      "captum_ssm: a row asked for is outside the sequence");
    }
  }
  const int64_t units = a.batch * a.H, width = Share::of<T>(a, count, 1, units).columns;
  const int64_t parts = up(count, width), scratch = k.wide_scratch(heads<T>(a, 0), 1, width);
  each_task<T>(units * parts, scratch, [&](int64_t task, T* space) {
    const int64_t unit = task % units, first = task / units * width;
    const int64_t b = unit / a.H, at = b * count + first;
    const int64_t h = unit % a.H;
    k.rows({heads<T>(a, b), h, h + 1, rows.data() + at, slots.data() + at,
            std::min(count - first, width), out + unit * count * a.L, nullptr},
           space);
  });
}

Tensor linear_attention_rows(const Tensor& index, const Tensor& query, const Tensor& key,
                             const Tensor& log_decay, const std::optional<Tensor>& erase,
                             const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  const Tensor rows = row_index(index, a.query);
  Tensor out = torch::stable::new_empty(a.query, {a.batch, a.H, rows.size(1), a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    head_rows<T>(a, rows.const_data_ptr<int64_t>(), rows.size(1), out.mutable_data_ptr<T>());
  });
  return out;
}

// Each task adds up all heads for some of the rows, in columns, and transposes the sum at the end.
template <class T>
void mean_rows(const HeadArguments& a, int64_t start, int64_t stop, T* out) {
  const HeadsKernels<T>& k = kernels<T>().heads;
  const int64_t count = stop - start, width = Share::of<T>(a, count, 1, a.batch).columns;
  const int64_t parts = up(count, width), scratch = k.wide_scratch(heads<T>(a, 0), 1, width);
  std::vector<int64_t> rows(count);
  for (int64_t r = 0; r < count; ++r) rows[r] = stop - 1 - r;
  each_task<T>(a.batch * parts, scratch, [&](int64_t task, T* space) {
    // The latest rows take the most work, so they come first.
    const int64_t b = task % a.batch, first = task / a.batch * width;
    const int64_t columns = std::min(count - first, width);
    Buffer<T> sum(a.L * columns);
    std::fill_n(sum.get(), a.L * columns, T(0));
    k.rows({heads<T>(a, b), 0, a.H, rows.data() + first, nullptr, columns, nullptr, sum.get()},
           space);
    constexpr int64_t kSquare = 16;
    const T scale = T(1) / T(a.H);
    T* last = out + (b * count + count - 1 - first) * a.L;  // the row of the first column
    for (int64_t t0 = 0; t0 < a.L; t0 += kSquare)
      for (int64_t p0 = 0; p0 < columns; p0 += kSquare)
        for (int64_t p = p0; p < std::min(p0 + kSquare, columns); ++p)
          for (int64_t t = t0; t < std::min(t0 + kSquare, a.L); ++t)
            last[t - p * a.L] = sum.get()[t * columns + p] * scale;
  });
}

// Each task weighs and adds up all heads for some of `count` rows; w is that of all sequences.
template <class T>
void weighted_mean_rows(const HeadArguments& a, const HeadWeights<T>& w, int64_t count) {
  const HeadsKernels<T>& k = kernels<T>().heads;
  const int64_t width = Share::of<T>(a, count, 1, a.batch, w.P).columns, parts = up(count, width);
  std::vector<int64_t> rows(count);
  for (int64_t r = 0; r < count; ++r) rows[r] = w.first + count - 1 - r;
  auto part = [&](int64_t b, int64_t first) {
    return HeadRows<T>{heads<T>(a, b), 0, a.H, rows.data() + first, nullptr,
                       std::min(count - first, width), nullptr, nullptr};
  };
  auto of = [&](int64_t b) {
    auto at = [&](const T* x, int64_t tokens) { return x ? x + b * tokens * w.D : nullptr; };
    HeadWeights<T> own = w;
    own.left = at(w.left, count), own.right = at(w.right, a.L), own.columns = at(w.columns, a.L);
    own.out += b * count * a.L;
    return own;
  };
  each_task<T>(a.batch * parts, k.weighted_scratch(part(0, 0), of(0)), [&](int64_t task, T* space) {
    const int64_t b = task % a.batch;
    k.weighted(part(b, task / a.batch * width), of(b), space);
  });
}

Tensor linear_attention_weighted(const Tensor& left_, const std::optional<Tensor>& right_,
                                 const std::optional<Tensor>& taps_,
                                 const std::optional<Tensor>& columns_, const Tensor& query,
                                 const Tensor& key, const Tensor& log_decay,
                                 const std::optional<Tensor>& erase,
                                 const std::optional<Tensor>& probe,
                                 const std::optional<Tensor>& bonus, int64_t start) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  const Tensor left = whole(left_, query, 3);
  const int64_t count = left.size(1), D = left.size(2);
  std::optional<Tensor> right, taps, columns;
  if (right_) right = whole(*right_, query, 3);
  if (taps_) taps = whole(*taps_, query, 2);
  if (columns_) columns = whole(*columns_, query, 3);
  check_range(start, start + count, a.L);
  STD_TORCH_CHECK(left.size(0) == a.batch && D > 0 && D % a.H == 0 &&
                      (!taps || (taps->size(0) == D && taps->size(1) > 0)),
                  "captum_ssm: the shapes of the weights do not agree");
  for (const auto* x : {&right, &columns})
    STD_TORCH_CHECK(!*x || ((*x)->size(0) == a.batch && (*x)->size(1) == a.L && (*x)->size(2) == D),
                    "captum_ssm: the shapes of the weights do not agree");
  Tensor out = torch::stable::new_empty(a.query, {a.batch, count, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    weighted_mean_rows<T>(a,
                          {left.const_data_ptr<T>(), data<T>(right), data<T>(taps),
                           data<T>(columns), start, D / a.H, D, taps ? taps->size(1) : 1,
                           out.mutable_data_ptr<T>()},
                          count);
  });
  return out;
}

Tensor linear_attention_mean(const Tensor& query, const Tensor& key, const Tensor& log_decay,
                             const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus, int64_t start, int64_t stop) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  check_range(start, stop, a.L);
  Tensor out = torch::stable::new_empty(a.query, {a.batch, stop - start, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    mean_rows<T>(a, start, stop, out.mutable_data_ptr<T>());
  });
  return out;
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CPU, m) {
  m.impl("linear_attention_scan", TORCH_BOX(&captum_ssm::linear_attention_scan));
  m.impl("linear_attention_scan_backward",
         TORCH_BOX(&captum_ssm::linear_attention_scan_backward));
  m.impl("linear_attention_rmatvec", TORCH_BOX(&captum_ssm::linear_attention_rmatvec));
  m.impl("linear_attention_rows", TORCH_BOX(&captum_ssm::linear_attention_rows));
  m.impl("linear_attention_mean", TORCH_BOX(&captum_ssm::linear_attention_mean));
  m.impl("linear_attention_weighted", TORCH_BOX(&captum_ssm::linear_attention_weighted));
}
