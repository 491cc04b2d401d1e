// A workspace: while one is open, memory that tensors on the CPU give back is kept and handed out
// again, instead of going back to the operating system and coming from there anew, page by page.
//
// It stands before PyTorch's allocator, whose interface is no part of the stable ABI, so this is an
// extension of its own: built for one release of PyTorch, and used with that release only.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

namespace {

// Blocks are whole chunks. Linux moves a chunk to another address by one entry of the page tables.
constexpr size_t kChunk = size_t(2) << 20;

// Smaller tensors stay with malloc, which keeps them itself, unless a workspace says otherwise.
constexpr size_t kSmallest = size_t(8) << 20;

struct Block {
  char* data;
  size_t size;
};

char* map(char* at, size_t size, int flags) {
  void* found = mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

// Addresses that begin at a chunk's boundary, still without pages; null if there are none.
char* map_chunks(size_t size) {
  char* found = map(nullptr, size + kChunk, 0);
  if (!found) return nullptr;
  const size_t before = (kChunk - reinterpret_cast<uintptr_t>(found) % kChunk) % kChunk;
  if (before) munmap(found, before);
  munmap(found + before + size, kChunk - before);
  return found + before;
}

// Moves the pages of a chunk. Where the number of mappings has reached its limit they are given
// back, and there will be new ones.
bool move_chunk(char* from, char* to) {
  if (mremap(from, kChunk, kChunk, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) return true;
  munmap(from, kChunk);
  return map(to, kChunk, MAP_FIXED) != nullptr;
}

class Workspace final : public c10::Allocator {
 public:
  // Tensors may outlive all else, and their memory comes back here: never destroyed.
  static Workspace& get() {
    static Workspace* workspace = new Workspace();
    return *workspace;
  }

  // Opens a workspace, or one more within it, for tensors of so many bytes; of several that are
  // open the smallest number counts. Not where somebody else's allocator is in use.
  void enter(size_t smallest) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_ == 0 || smallest < smallest_) smallest_ = smallest;
    // Threads that allocate meanwhile read one pointer or the other, and both stay valid.
    if (open_++ == 0 && c10::GetCPUAllocator() == torch_) c10::SetCPUAllocator(this);
  }

  // Closes what the last enter() opened; with the first one, everything kept is given back.
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_ > 0 && --open_ == 0) close();
  }

  bool in_use() const { return c10::GetCPUAllocator() == this; }

  size_t kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t size = 0;
    for (const Block& block : kept_) size += block.size;
    return size;
  }

  c10::DataPtr allocate(size_t size) override {
    if (size < smallest_) return torch_->allocate(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    char* const data = open_ ? take((size + kChunk - 1) / kChunk * kChunk) : nullptr;
    if (!data) return torch_->allocate(size);
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
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
    for (const Block& block : kept_) munmap(block.data, block.size);
    kept_.clear();
  }

  // Memory of whole chunks, of the smallest kept block that is large enough, or else gathered; null
  // if there is none. New pages are used only where none are kept, so that the pages of a workspace
  // are never more than its tensors had at the worst moment.
  char* take(size_t size) {
    auto best = kept_.end();
    for (auto block = kept_.begin(); block != kept_.end(); ++block) {
      if (block->size >= size && (best == kept_.end() || block->size < best->size)) best = block;
    }
    char* const data = best == kept_.end() ? gather(size) : cut(best, size);
    if (data) sizes_.emplace(data, size);
    return data;
  }

  // The beginning of a kept block; what is left of it stays.
  char* cut(std::list<Block>::iterator block, size_t size) {
    char* const data = block->data;
    block->data += size;
    block->size -= size;
    if (block->size == 0) kept_.erase(block);
    return data;
  }

  // New addresses, to which the pages of kept blocks are moved, the oldest first.
  char* gather(size_t size) {
    char* const data = map_chunks(size);
    if (!data) return nullptr;
    for (size_t at = 0; at < size && !kept_.empty(); at += kChunk) {
      if (!move_chunk(cut(kept_.begin(), kChunk), data + at)) {
        munmap(data, size);
        return nullptr;
      }
    }
    return data;
  }

  // Called for every tensor whose memory came from here, at any time and on any thread.
  static void give_back(void* data) {
    Workspace& self = get();
    const std::lock_guard<std::mutex> lock(self.mutex_);
    const auto found = self.sizes_.find(data);
    if (found == self.sizes_.end()) return self.torch_->raw_deallocate(data);
    c10::profiledCPUMemoryReporter().Delete(data);
    const Block block{static_cast<char*>(data), found->second};
    self.sizes_.erase(found);
    if (self.open_) {
      self.kept_.push_back(block);
    } else {
      munmap(block.data, block.size);
    }
  }

  c10::Allocator* const torch_;
  std::mutex mutex_;
  int open_ = 0;
  std::atomic<size_t> smallest_ = kSmallest;
  std::list<Block> kept_;                    // the oldest first
  std::unordered_map<void*, size_t> sizes_;  // of the blocks that tensors have
};

PyObject* enter(PyObject*, PyObject* args) {
  Py_ssize_t smallest = kSmallest;
  if (!PyArg_ParseTuple(args, "|n", &smallest)) return nullptr;
  Workspace::get().enter(smallest);
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

PyMethodDef methods[] = {{"enter", enter, METH_VARARGS, nullptr},
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
