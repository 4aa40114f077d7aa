// The build without access hooks: native speed; only divergence and the limits are seen.
#include "state.h"

#include <stdlib.h>

alignas(64) static char shared_memory[kMaxSharedBytes + 64 * EMU_MAX_SHARED];
static size_t shared_used;

void check_begin_launch(emu_launch* job, void** buffers) {
  shared_used = 0;
  for (uint32_t i = 0; i < job->count; ++i) buffers[i] = job->buffers[i].data;
}
void check_end_launch(emu_launch*) {}
void check_begin_group() {}
void check_barrier(uint32_t) {}
void check_simd(SimdGroup*, uint32_t, uint32_t) {}
void check_end_group() {}
void check_settle() {}
void* check_shared(uint32_t, size_t bytes, size_t, bool) {
  void* p = shared_memory + shared_used;
  shared_used += (bytes + 63) / 64 * 64;
  return p;
}
extern "C" void emu_atomic_access(const void*, uint32_t, uint32_t, uint32_t) {}
