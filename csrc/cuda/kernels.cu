// The operations of captum_ssm on CUDA tensors: see csrc/cpu/. emulate.cpp checks the kernels on the
// host.

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "../arguments.h"
#include "diagonal_gradient.cuh"
#include "linear_attention.cuh"
#include "linear_attention_gradient.cuh"
#include "matrix.cuh"
#include "recurrence.cuh"
#include "rows.cuh"
#include "taps.cuh"

namespace captum_ssm {
namespace {

template <class T>
gpu::Maps<T> maps(const DiagonalArguments& a) {
  STD_TORCH_CHECK(a.K <= gpu::kMaxTaps, "captum_ssm: the CUDA kernels support at most 64 taps");
  return {a.dt.const_data_ptr<T>(), a.right.const_data_ptr<T>(), a.A.const_data_ptr<T>(),
          a.B.const_data_ptr<T>(), a.C.const_data_ptr<T>(), data<T>(a.left), data<T>(a.conv),
          data<T>(a.columns), a.batch, a.L, a.D, a.N, a.G, a.K};
}

cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// A run's starting states, which it needs where there are several chunks.
struct Starts {
  Tensor state, elapsed;

  Starts(const Tensor& like, bool needed, int64_t states, int64_t sums)
      : state(torch::stable::new_empty(like, {needed ? states : 0})),
        elapsed(torch::stable::new_empty(like, {needed ? sums : 0})) {}

  static Starts of(const DiagonalArguments& a) {
    const int64_t chunks = (a.L + gpu::kChunk - 1) / gpu::kChunk, D = a.batch * chunks * a.D;
    return {a.dt, chunks > 1, D * a.N, D};
  }
  template <class T>
  static Starts of(const Tensor& like, const gpu::HeadsRun<T>& r) {
    return {like, r.chunks() > 1, r.states(), r.sums()};
  }
  template <class R>
  void give(R& r) {
    using T = std::remove_pointer_t<decltype(r.state)>;
    r.state = state.mutable_data_ptr<T>(), r.elapsed = elapsed.mutable_data_ptr<T>();
  }
};

Tensor recurrence(const DiagonalArguments& a, bool backward, const Tensor& input, bool mean) {
  torch::stable::accelerator::DeviceGuard guard(a.dt.get_device_index());
  const int64_t batch = a.batch, L = a.L, D = a.D;
  const bool shared = input.dim() == 2;
  STD_TORCH_CHECK(input.numel() == batch * L * (shared ? 1 : D),
                  "captum_ssm: the values must have the shape of dt");
  const Tensor out = mean ? torch::stable::new_empty(a.dt, {batch, L})
                          : torch::stable::new_empty(a.dt, {batch, L, D});
  if (batch == 0) return out;
  Starts starts = Starts::of(a);
  const Tensor partial =
      torch::stable::new_empty(a.dt, {mean ? gpu::channel_blocks(D) * batch * L : 0});
  dispatch(a.dt, [&](auto zero) {
    using T = decltype(zero);
    T* p = out.mutable_data_ptr<T>();
    T* const sums = mean ? partial.mutable_data_ptr<T>() : nullptr;
    gpu::Run<T> r{maps<T>(a), backward, shared, input.const_data_ptr<T>(), mean ? nullptr : p, sums};
    starts.give(r);
    STD_CUDA_CHECK(gpu::run<T>(r, mean ? p : nullptr, stream_of(a.dt)));
  });
  return out;
}

Tensor diagonal_scan(const Tensor& v, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& B, const Tensor& C, const std::optional<Tensor>& left) {
  const DiagonalArguments a(dt, right, A, B, C, left, std::nullopt);
  return recurrence(a, false, whole(v, dt, 3), false);
}

using SevenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SevenTensors diagonal_scan_backward(
    const Tensor& grad, const Tensor& v, const Tensor& dt, const Tensor& right, const Tensor& A,
    const Tensor& B, const Tensor& C, const std::optional<Tensor>& left, std::vector<bool> wanted) {
  const DiagonalArguments a(dt, right, A, B, C, left, std::nullopt);
  const Tensor out = whole(grad, dt, 3), in = whole(v, dt, 3);
  STD_TORCH_CHECK(in.numel() == a.dt.numel() && out.numel() == a.dt.numel(),
                  "captum_ssm: grad and v must have the shape of dt");
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  Gradients make(a.dt, wanted);
  Tensor of_v = make.next(v, true), of_dt = make.next(dt, true), of_right = make.next(right, true);
  Tensor of_A = make.next(A, true), of_B = make.next(B, true), of_C = make.next(C, true);
  Tensor of_left = make.next(left, true);
  if (a.batch > 0)
    dispatch(a.dt, [&](auto zero) {
      using T = decltype(zero);
      gpu::Run<T> values{maps<T>(a), false, false, in.const_data_ptr<T>()};
      gpu::Run<T> gradient{maps<T>(a), true, false, out.const_data_ptr<T>()};
      Starts of_values = Starts::of(a), of_gradient = Starts::of(a);
      of_values.give(values), of_gradient.give(gradient);
      const gpu::Gradient<T> r{values,
                               gradient,
                               if_wanted<T>(of_v),
                               if_wanted<T>(of_dt),
                               if_wanted<T>(of_right),
                               if_wanted<T>(of_A),
                               if_wanted<T>(of_B),
                               if_wanted<T>(of_C),
                               if_wanted<T>(of_left)};
      STD_CUDA_CHECK(gpu::gradient<T>(r, stream_of(a.dt)));
    });
  return {of_v, of_dt, of_right, of_A, of_B, of_C, of_left};
}

Tensor diagonal_rmatvec(const Tensor& w, const Tensor& dt, const Tensor& right, const Tensor& A,
                        const Tensor& B, const Tensor& C, const std::optional<Tensor>& left,
                        const std::optional<Tensor>& conv, bool mean) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv);
  return recurrence(a, true, whole(w, dt, w.dim() == 2 ? 2 : 3), mean);
}

Tensor diagonal_mean(const Tensor& dt, const Tensor& right, const Tensor& A, const Tensor& B,
                     const Tensor& C, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv, const std::optional<Tensor>& columns,
                     int64_t start, int64_t stop) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv, columns);
  const int64_t batch = a.batch, L = a.L, D = a.D;
  check_range(start, stop, L);
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  const Tensor out = torch::stable::new_zeros(dt, {batch, stop - start, L});
  if (batch == 0) return out;
  const Tensor before = torch::stable::new_empty(dt, {batch, L, D});
  const Tensor after = torch::stable::new_empty(dt, {batch, L, D});
  const int64_t sums = batch * ((stop + gpu::kTile - 1) / gpu::kTile + 1) * D;
  const Tensor sum = torch::stable::new_empty(dt, {sums}, ScalarType::Double);
  const Tensor resets = torch::stable::new_empty(dt, {sums}, ScalarType::Int);
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    const gpu::Mean<T> p{maps<T>(a),
                         {before.mutable_data_ptr<T>(), after.mutable_data_ptr<T>(),
                          sum.mutable_data_ptr<double>(), resets.mutable_data_ptr<int>()},
                         out.mutable_data_ptr<T>(),
                         start,
                         stop};
    STD_CUDA_CHECK(gpu::mean<T>(p, stream_of(dt)));
  });
  return out;
}

Tensor diagonal_rows(const Tensor& index_, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& B, const Tensor& C, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv) {
  const DiagonalArguments a(dt, right, A, B, C, left, conv);
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  const Tensor index = row_index(index_, a.dt);
  const Tensor out = torch::stable::new_empty(dt, {a.batch, a.D, index.size(1), a.L});
  if (out.numel() == 0) return out;
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    const gpu::MatrixRows<T> r{maps<T>(a), index.const_data_ptr<int64_t>(), index.size(1),
                               out.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(dt)));
  });
  return out;
}

// ---- matrix-valued states --------------------------------------------------------------------

template <class T>
gpu::Rows<T> rows_of(const std::optional<Tensor>& x) {
  if (!x) return {nullptr, 0, 0, 0};
  return {x->const_data_ptr<T>(), x->stride(0), x->stride(1), x->size(2) == 1 ? 0 : x->stride(2)};
}

template <class T>
gpu::Heads<T> heads(const HeadArguments& a) {
  STD_TORCH_CHECK(a.N <= gpu::kMaxKeys,
                  "captum_ssm: the CUDA kernels support at most 1024 keys per head");
  return {rows_of<T>(a.query), rows_of<T>(a.key),   rows_of<T>(a.log_decay),
          rows_of<T>(a.erase), rows_of<T>(a.probe), rows_of<T>(a.bonus),
          a.log_decay.size(3) > 1, a.batch, a.L, a.H, a.N};
}

Tensor run(const HeadArguments& a, bool backward, const Tensor& given) {
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor input = a.values(given, backward);
  const int64_t P = input.size(3);
  const Tensor out = torch::stable::new_empty(a.query, {a.batch, a.L, a.H, P});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    gpu::HeadsRun<T> r{heads<T>(a), P, backward, rows_of<T>(input), out.mutable_data_ptr<T>()};
    Starts starts = Starts::of(a.query, r);
    starts.give(r);
    STD_CUDA_CHECK(gpu::run<T>(r, stream_of(a.query)));
  });
  return out;
}

Tensor linear_attention_scan(const Tensor& v, const Tensor& query, const Tensor& key,
                             const Tensor& log_decay, const std::optional<Tensor>& erase,
                             const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus) {
  return run(HeadArguments(query, key, log_decay, erase, probe, bonus), false, v);
}

SevenTensors linear_attention_scan_backward(
    const Tensor& grad, const Tensor& v, const Tensor& query, const Tensor& key,
    const Tensor& log_decay, const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
    const std::optional<Tensor>& bonus, std::vector<bool> wanted) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor in = a.values(v, false), output = a.values(grad, false);
  STD_TORCH_CHECK(output.size(3) == in.size(3), "captum_ssm: grad must have the shape of v");
  Gradients make(a.query, wanted);
  Tensor of_v = make.next(v, true), of_query = make.next(query, true);
  Tensor of_key = make.next(key, true), of_log_decay = make.next(log_decay, true);
  Tensor of_erase = make.next(erase, true), of_probe = make.next(probe, true);
  Tensor of_bonus = make.next(bonus, true);
  if (in.numel() > 0)
    dispatch(a.query, [&](auto zero) {
      using T = decltype(zero);
      gpu::HeadsRun<T> values{heads<T>(a), in.size(3), false, rows_of<T>(in)};
      gpu::HeadsRun<T> gradient{heads<T>(a), in.size(3), true, rows_of<T>(output)};
      Starts of_values = Starts::of(a.query, values), of_gradient = Starts::of(a.query, gradient);
      of_values.give(values), of_gradient.give(gradient);
      gpu::HeadsGradient<T> r{values,
                              gradient,
                              if_wanted<T>(of_v),
                              if_wanted<T>(of_query),
                              if_wanted<T>(of_key),
                              if_wanted<T>(of_log_decay),
                              if_wanted<T>(of_erase),
                              if_wanted<T>(of_probe),
                              if_wanted<T>(of_bonus),
                              nullptr};
      const Tensor checkpoints = torch::stable::new_empty(a.query, {r.states()});
      r.checkpoints = checkpoints.mutable_data_ptr<T>();
      STD_CUDA_CHECK(gpu::gradient<T>(r, stream_of(a.query)));
    });
  return {of_v, of_query, of_key, of_log_decay, of_erase, of_probe, of_bonus};
}

Tensor linear_attention_rmatvec(const Tensor& w, const Tensor& query, const Tensor& key,
                                const Tensor& log_decay, const std::optional<Tensor>& erase,
                                const std::optional<Tensor>& probe,
                                const std::optional<Tensor>& bonus) {
  return run(HeadArguments(query, key, log_decay, erase, probe, bonus), true, w);
}

Tensor linear_attention_rows(const Tensor& index_, const Tensor& query, const Tensor& key,
                             const Tensor& log_decay, const std::optional<Tensor>& erase,
                             const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor index = row_index(index_, a.query);
  const int64_t count = index.size(1);
  const Tensor out = torch::stable::new_empty(a.query, {a.batch, a.H, count, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    const gpu::HeadRows<T> r{heads<T>(a), count, index.const_data_ptr<int64_t>(), 0,
                             out.mutable_data_ptr<T>(), false};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(a.query)));
  });
  return out;
}

Tensor linear_attention_mean(const Tensor& query, const Tensor& key, const Tensor& log_decay,
                             const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
                             const std::optional<Tensor>& bonus, int64_t start, int64_t stop) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  check_range(start, stop, a.L);
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor out = torch::stable::new_zeros(a.query, {a.batch, stop - start, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    const gpu::HeadRows<T> r{heads<T>(a), stop - start, nullptr, start,
                             out.mutable_data_ptr<T>(), true};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(a.query)));
  });
  return out;
}

// ---- taps ------------------------------------------------------------------------------------

void tap_rows(const Tensor& rows, const Tensor& values, const std::optional<Tensor>& left,
              Tensor out) {
  const TapArguments a(rows, values, left, out);
  if (out.numel() == 0) return;
  torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  dispatch(rows, [&](auto zero) {
    using T = decltype(zero);
    const gpu::TapRows<T> t{a.rows.const_data_ptr<T>(), a.values.const_data_ptr<T>(),
                            data<T>(a.left), a.B, a.M, a.D, a.R, a.L, a.C, a.K, a.stride,
                            out.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::tap_rows<T>(t, stream_of(rows)));
  });
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CUDA, m) {
  m.impl("diagonal_scan", TORCH_BOX(&captum_ssm::diagonal_scan));
  m.impl("diagonal_scan_backward", TORCH_BOX(&captum_ssm::diagonal_scan_backward));
  m.impl("diagonal_rmatvec", TORCH_BOX(&captum_ssm::diagonal_rmatvec));
  m.impl("diagonal_mean", TORCH_BOX(&captum_ssm::diagonal_mean));
  m.impl("diagonal_rows", TORCH_BOX(&captum_ssm::diagonal_rows));
  m.impl("linear_attention_scan", TORCH_BOX(&captum_ssm::linear_attention_scan));
  m.impl("linear_attention_scan_backward",
         TORCH_BOX(&captum_ssm::linear_attention_scan_backward));
  m.impl("linear_attention_rmatvec", TORCH_BOX(&captum_ssm::linear_attention_rmatvec));
  m.impl("linear_attention_rows", TORCH_BOX(&captum_ssm::linear_attention_rows));
  m.impl("linear_attention_mean", TORCH_BOX(&captum_ssm::linear_attention_mean));
  m.impl("tap_rows", TORCH_BOX(&captum_ssm::tap_rows));
}

#ifndef CAPTUM_SSM_HUB
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
#endif
