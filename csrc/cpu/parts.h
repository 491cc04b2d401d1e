// The scratch memory of a task, given out part by part. No includes here (see vec.h).

// Parts start at multiples of 64 bytes. Without memory they are only counted.
template <class T>
struct Parts {
  T* base;
  int64_t total = 0;

  T* take(int64_t count) {
    T* part = base + total;
    const int64_t size = round_up(count, 64 / sizeof(T));
    total += size;
#if defined(__SANITIZE_ADDRESS__)
    // A gap after each part, so that running from one into the next is seen. The task before may
    // have had its gaps elsewhere.
    if (base) {
      __asan_unpoison_memory_region(part, size * sizeof(T));
      __asan_poison_memory_region(base + total, 64);
    }
    total += 64 / sizeof(T);
#endif
    return part;
  }
};
