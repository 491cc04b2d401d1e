// A workspace: while one is open, memory that tensors on the CPU give back is kept and handed out
// again, instead of going back to the operating system and coming from there anew, page by page.
//
// It stands before PyTorch's allocator, whose interface is no part of the stable ABI, so this is an
// extension of its own: built for one version of PyTorch, and loaded with that version only.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <unordered_map>

namespace {

// Smaller ones malloc itself keeps and hands out again.
constexpr size_t kSmallest = size_t(1) << 20;

// A block may serve a tensor that it exceeds by 1/8 at most.
constexpr size_t kUnused = 8;

// What is used and kept together may exceed the most that was used by 1/20.
constexpr size_t kSpare = 20;

struct Block {
  void* data;
  size_t size;
};

class Workspace final : public c10::Allocator {
 public:
  // Tensors may outlive all else, and their memory comes back here: never destroyed.
  static Workspace& get() {
    static Workspace* workspace = new Workspace();
    return *workspace;
  }

  // Opens a workspace, or one more within it. Not where somebody else's allocator is in use.
  void enter() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_++ > 0) return;
    most_used_ = used_;
    // Threads that allocate meanwhile read one pointer or the other, and both stay valid.
    if (c10::GetCPUAllocator() == torch_) c10::SetCPUAllocator(this);
  }

  // Closes what the last enter() opened; with the first one, everything kept is given back.
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_ > 0 && --open_ == 0) close();
  }

  bool in_use() const { return c10::GetCPUAllocator() == this; }

  size_t kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kept_bytes_;
  }

  c10::DataPtr allocate(size_t size) override {
    if (size < kSmallest) return torch_->allocate(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_ == 0) return torch_->allocate(size);
    const Block block = take(size);
    return {block.data, block.data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  Workspace() : torch_(c10::GetDefaultCPUAllocator()) {
    // A child has one thread, and no call that would close what another thread has opened.
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                   [] {
                     get().open_ = 0;
                     get().close();
                     get().mutex_.unlock();
                   });
  }

  void close() {
    if (in_use()) c10::SetCPUAllocator(torch_);
    while (!kept_.empty()) drop_oldest();
  }

  // The smallest block that is kept and large enough, or a new one. What is used and kept together
  // stays within a twentieth of what was used at the worst moment: so does the peak.
  Block take(size_t size) {
    auto best = kept_.end();
    for (auto block = kept_.begin(); block != kept_.end(); ++block) {
      const bool fits = size <= block->size && block->size <= size + size / kUnused;
      if (fits && (best == kept_.end() || block->size <= best->size)) best = block;
    }
    if (best == kept_.end()) {
      most_used_ = std::max(most_used_, used_ + size);
      while (!kept_.empty() && used_ + kept_bytes_ + size > most_used_ + most_used_ / kSpare) drop_oldest();
      kept_.push_back({torch_->raw_allocate(size), size});
      kept_bytes_ += size;
      best = std::prev(kept_.end());
    }
    const Block block = *best;
    sizes_.emplace(block.data, block.size);
    kept_.erase(best);
    kept_bytes_ -= block.size;
    used_ += block.size;
    return block;
  }

  void drop_oldest() {
    const Block block = kept_.front();
    kept_.pop_front();
    kept_bytes_ -= block.size;
    torch_->raw_deallocate(block.data);
  }

  // Of every tensor whose memory came from here, at any time and on any thread.
  static void give_back(void* data) {
    Workspace& self = get();
    const std::lock_guard<std::mutex> lock(self.mutex_);
    const auto found = self.sizes_.find(data);
    if (found == self.sizes_.end()) return self.torch_->raw_deallocate(data);
    const Block block{data, found->second};
    self.sizes_.erase(found);
    self.used_ -= block.size;
    self.kept_.push_back(block);
    self.kept_bytes_ += block.size;
    if (self.open_ == 0) self.drop_oldest();
  }

  c10::Allocator* const torch_;
  std::mutex mutex_;
  int open_ = 0;
  std::list<Block> kept_;  // the oldest first
  std::unordered_map<void*, size_t> sizes_;  // of blocks in use
  size_t used_ = 0, kept_bytes_ = 0, most_used_ = 0;
};

PyObject* enter(PyObject*, PyObject*) {
  Workspace::get().enter();
  Py_RETURN_NONE;
}

PyObject* leave(PyObject*, PyObject*) {
  Workspace::get().leave();
  Py_RETURN_NONE;
}

PyObject* in_use(PyObject*, PyObject*) {
  return PyBool_FromLong(Workspace::get().in_use());
}

PyObject* kept(PyObject*, PyObject*) {
  return PyLong_FromSize_t(Workspace::get().kept());
}

PyMethodDef methods[] = {{"enter", enter, METH_NOARGS, nullptr},
                         {"leave", leave, METH_NOARGS, nullptr},
                         {"in_use", in_use, METH_NOARGS, nullptr},
                         {"kept", kept, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_allocator(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_allocator", nullptr, -1, methods,
                               nullptr,               nullptr,        nullptr, nullptr};
  PyObject* made = PyModule_Create(&module);
  PyModule_AddStringConstant(made, "TORCH", TORCH_VERSION);
  return made;
}
