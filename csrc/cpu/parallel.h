// Work on torch's own threads: tasks taken from a counter, denormals flushed, scratch aligned.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace captum_ssm {

// Long decays become denormal numbers, which cost a factor of ten. The flag belongs to a thread,
// and torch.set_flush_denormal does not set it for torch's workers: each task sets and restores it.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t(1) << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
 public:
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

// Calls body(task, scratch) for every task, in order as threads become free.
template <class T, class Body>
void each_task(int64_t tasks, int64_t scratch, const Body& body) {
  const int64_t threads =
      std::min<int64_t>(tasks, std::max<int64_t>(1, torch::stable::get_num_threads()));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    // Where torch runs everything on one thread, that thread takes every task.
    if (begin == end) return;
    FlushDenormals flush;
    Buffer<T> buffer(scratch);
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) body(task, buffer.get());
  });
}

}  // namespace captum_ssm
