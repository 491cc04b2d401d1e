// The operators of captum_ssm on CUDA tensors: see csrc/cpu/ops.cpp. Operators that have no kernel
// here (diagonal_rows, linear_rows, linear_mean, tap_rows) take their PyTorch form, which Python
// registers for every device.

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "linear.cuh"
#include "matrix.cuh"
#include "recurrence.cuh"

namespace captum_ssm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

Tensor checked(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.is_cuda() && x.is_contiguous(),
                  "captum_ssm: the arguments must be contiguous CUDA tensors of one dtype");
  return x;
}

struct Arguments {
  Tensor dt, right, A, B, C;
  std::optional<Tensor> left, conv;

  Arguments(const Tensor& dt_, const Tensor& right_, const Tensor& A_, const Tensor& B_,
            const Tensor& C_, const std::optional<Tensor>& left_,
            const std::optional<Tensor>& conv_)
      : dt(checked(dt_, dt_)), right(checked(right_, dt_)), A(checked(A_, dt_)),
        B(checked(B_, dt_)), C(checked(C_, dt_)) {
    STD_TORCH_CHECK(dt.dim() == 3 && A.dim() == 2 && B.dim() == 4 && dt.numel() > 0 &&
                        right.numel() == dt.numel() && A.size(0) == dt.size(2) &&
                        B.size(0) == dt.size(0) && B.size(1) == dt.size(1) &&
                        B.size(3) == A.size(1) && dt.size(2) % B.size(2) == 0 &&
                        C.numel() == B.numel(),
                    "captum_ssm: the shapes of the coefficients do not agree");
    if (left_) left = checked(*left_, dt_);
    if (conv_) conv = checked(*conv_, dt_);
    STD_TORCH_CHECK((!left || left->numel() == dt.numel()) &&
                        (!conv || (conv->dim() == 2 && conv->size(0) == dt.size(2))),
                    "captum_ssm: left or conv has the wrong shape");
    STD_TORCH_CHECK(!conv || conv->size(1) <= gpu::kMaxTaps,
                    "captum_ssm: CUDA kernels take at most 64 taps");
  }

  template <class T>
  gpu::Maps<T> maps() const {
    return {dt.const_data_ptr<T>(), right.const_data_ptr<T>(), A.const_data_ptr<T>(),
            B.const_data_ptr<T>(), C.const_data_ptr<T>(), data<T>(left), data<T>(conv),
            dt.size(0), dt.size(1), dt.size(2), A.size(1), B.size(2),
            conv ? conv->size(1) : 1};
  }
};

cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class F>
void dispatch(const Tensor& x, const F& f) {
  if (x.scalar_type() == ScalarType::Float) {
    f(float());
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Double,
                    "captum_ssm: the kernels take float32 and float64");
    f(double());
  }
}

Tensor recurrence(const Arguments& a, bool backward, const Tensor& input, bool mean) {
  torch::stable::accelerator::DeviceGuard guard(a.dt.get_device_index());
  const int64_t batch = a.dt.size(0), L = a.dt.size(1), D = a.dt.size(2), N = a.A.size(1);
  const bool shared = input.dim() == 2;
  STD_TORCH_CHECK(input.numel() == batch * L * (shared ? 1 : D),
                  "captum_ssm: the values must have the shape of dt");
  const Tensor out = mean ? torch::stable::new_empty(a.dt, {batch, L})
                          : torch::stable::new_empty(a.dt, {batch, L, D});
  const int64_t chunks = (L + gpu::kChunk - 1) / gpu::kChunk;
  const Tensor state = torch::stable::new_empty(a.dt, {chunks > 1 ? batch * chunks * N * D : 0});
  const Tensor elapsed = torch::stable::new_empty(a.dt, {chunks > 1 ? batch * chunks * D : 0});
  const Tensor partial =
      torch::stable::new_empty(a.dt, {mean ? gpu::channel_blocks(D) * batch * L : 0});
  dispatch(a.dt, [&](auto zero) {
    using T = decltype(zero);
    T* p = out.mutable_data_ptr<T>();
    const gpu::Run<T> r{a.maps<T>(),
                        backward,
                        shared,
                        input.const_data_ptr<T>(),
                        mean ? nullptr : p,
                        mean ? partial.mutable_data_ptr<T>() : nullptr,
                        state.mutable_data_ptr<T>(),
                        elapsed.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::run<T>(r, mean ? p : nullptr, stream_of(a.dt)));
  });
  return out;
}

Tensor diagonal_scan(const Tensor& v, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& Bm, const Tensor& Cm, const std::optional<Tensor>& left) {
  const Arguments a(dt, right, A, Bm, Cm, left, std::nullopt);
  return recurrence(a, false, checked(v, dt), false);
}

Tensor diagonal_vecmat(const Tensor& w, const Tensor& dt, const Tensor& right, const Tensor& A,
                       const Tensor& Bm, const Tensor& Cm, const std::optional<Tensor>& left,
                       const std::optional<Tensor>& conv, bool mean) {
  const Arguments a(dt, right, A, Bm, Cm, left, conv);
  return recurrence(a, true, checked(w, dt), mean);
}

Tensor diagonal_mean(const Tensor& dt, const Tensor& right, const Tensor& A, const Tensor& Bm,
                     const Tensor& Cm, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv, int64_t start, int64_t stop) {
  const Arguments a(dt, right, A, Bm, Cm, left, conv);
  const int64_t batch = dt.size(0), L = dt.size(1), D = dt.size(2);
  STD_TORCH_CHECK(0 <= start && start < stop && stop <= L,
                  "captum_ssm: the rows asked for leave the sequence");
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  const Tensor out = torch::stable::new_zeros(dt, {batch, stop - start, L});
  const Tensor before = torch::stable::new_empty(dt, {batch, L, D});
  const Tensor after = torch::stable::new_empty(dt, {batch, L, D});
  const int64_t sums = batch * ((stop + gpu::kTile - 1) / gpu::kTile + 1) * D;
  const Tensor sum = torch::stable::new_empty(dt, {sums}, ScalarType::Double);
  const Tensor resets = torch::stable::new_empty(dt, {sums}, ScalarType::Int);
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    const gpu::Mean<T> p{a.maps<T>(),
                         {before.mutable_data_ptr<T>(), after.mutable_data_ptr<T>(),
                          sum.mutable_data_ptr<double>(), resets.mutable_data_ptr<int>()},
                         out.mutable_data_ptr<T>(),
                         start,
                         stop};
    STD_CUDA_CHECK(gpu::mean<T>(p, stream_of(dt)));
  });
  return out;
}

// ---- matrix-valued states --------------------------------------------------------------------

// Only the numbers of one token and head have to be contiguous.
Tensor rows(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.is_cuda() && x.dim() == 4,
                  "captum_ssm: the arguments must be CUDA tensors of one dtype");
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

template <class T>
gpu::Rows<T> rows_of(const std::optional<Tensor>& x) {
  if (!x) return {nullptr, 0, 0, 0};
  return {x->const_data_ptr<T>(), x->stride(0), x->stride(1), x->size(2) == 1 ? 0 : x->stride(2)};
}

Tensor linear(bool backward, const Tensor& given, const Tensor& query_, const Tensor& key_,
              const Tensor& log_decay_, const std::optional<Tensor>& erase_,
              const std::optional<Tensor>& probe_, const std::optional<Tensor>& bonus_) {
  torch::stable::accelerator::DeviceGuard guard(query_.get_device_index());
  const Tensor query = rows(query_, query_), key = rows(key_, query_);
  const Tensor log_decay = rows(log_decay_, query_), input = rows(given, query_);
  std::optional<Tensor> erase, probe, bonus;
  STD_TORCH_CHECK(erase_.has_value() == probe_.has_value(),
                  "captum_ssm: erase and probe go together");
  if (erase_) erase = rows(*erase_, query), probe = rows(*probe_, query);
  if (bonus_) bonus = rows(torch::stable::unsqueeze(*bonus_, -1), query);
  const int64_t batch = query.size(0), L = query.size(1), H = query.size(2), N = query.size(3);
  const int64_t P = input.size(3);
  auto fits = [&](const Tensor& x, int64_t heads, int64_t size) {
    return x.size(0) == batch && x.size(1) == L && x.size(2) == heads && x.size(3) == size;
  };
  STD_TORCH_CHECK(L > 0 && H > 0 && N > 0 && fits(key, H, N) &&
                      (fits(log_decay, H, 1) || fits(log_decay, H, N)) &&
                      (!erase || (fits(*erase, H, N) && fits(*probe, H, N))) &&
                      (!bonus || fits(*bonus, H, 1)) &&
                      (fits(input, H, P) || (backward && fits(input, 1, P))),
                  "captum_ssm: the shapes of the arguments do not agree");
  STD_TORCH_CHECK(N <= gpu::kMaxKeys, "captum_ssm: CUDA kernels take at most 1024 keys a head");
  const Tensor out = torch::stable::new_empty(query, {batch, L, H, P});
  if (out.numel() == 0) return out;
  dispatch(query, [&](auto zero) {
    using T = decltype(zero);
    gpu::HeadsRun<T> r{rows_of<T>(query), rows_of<T>(key),   rows_of<T>(log_decay),
                       rows_of<T>(erase), rows_of<T>(probe), rows_of<T>(bonus),
                       rows_of<T>(input), log_decay.size(3) > 1, backward,
                       batch, L, H, N, P, out.mutable_data_ptr<T>(), nullptr, nullptr};
    const int64_t states = r.chunks() > 1 ? r.columns() * r.chunks() * N : 0;
    const Tensor state = torch::stable::new_empty(query, {states});
    const Tensor elapsed = torch::stable::new_empty(query, {states});
    r.state = state.mutable_data_ptr<T>(), r.elapsed = elapsed.mutable_data_ptr<T>();
    STD_CUDA_CHECK(gpu::run<T>(r, stream_of(query)));
  });
  return out;
}

Tensor linear_scan(const Tensor& v, const Tensor& query, const Tensor& key, const Tensor& log_decay,
                   const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
                   const std::optional<Tensor>& bonus) {
  return linear(false, v, query, key, log_decay, erase, probe, bonus);
}

Tensor linear_vecmat(const Tensor& w, const Tensor& query, const Tensor& key,
                     const Tensor& log_decay, const std::optional<Tensor>& erase,
                     const std::optional<Tensor>& probe, const std::optional<Tensor>& bonus) {
  return linear(true, w, query, key, log_decay, erase, probe, bonus);
}

}  // namespace
}  // namespace captum_ssm

STABLE_TORCH_LIBRARY_IMPL(captum_ssm, CUDA, m) {
  m.impl("diagonal_scan", TORCH_BOX(&captum_ssm::diagonal_scan));
  m.impl("diagonal_vecmat", TORCH_BOX(&captum_ssm::diagonal_vecmat));
  m.impl("diagonal_mean", TORCH_BOX(&captum_ssm::diagonal_mean));
  m.impl("linear_scan", TORCH_BOX(&captum_ssm::linear_scan));
  m.impl("linear_vecmat", TORCH_BOX(&captum_ssm::linear_vecmat));
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
