// Where the buffers and threadgroup variables of a checked or counted launch lie.
#include "shadow.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__APPLE__)
#include <dlfcn.h>
#endif

Arena emu_arena;

namespace {

constexpr uint32_t kBuffers = 64;

uint32_t log2_of(uint64_t n) {
  uint32_t s = 0;
  while ((2ull << s) <= n) ++s;
  return s;
}

// The start of the slot keeps the object aligned, and the slot before it ends in unused space.
Region& place_region(uint32_t slot, uint64_t bytes, size_t element, Role role, uint32_t id,
                     bool with_cells) {
  Region& r = emu_arena.slots[slot];
  r.data = emu_arena.base + (uint64_t(slot) << emu_arena.slot_shift);
  r.bytes = bytes;
  r.role = role;
  r.id = id;
  r.shift = r.finer ? 0 : log2_of(element < 4 ? element : 4);
  free(r.cells);
  r.cells = nullptr;
  if (with_cells && role != INPUT)
    r.cells = static_cast<Cell*>(calloc((bytes >> r.shift) + 1, sizeof(Cell)));
  return r;
}

bool map_arena(uint64_t largest) {
  const uint32_t shift = log2_of(4 * largest + (1 << 20)) + 1;
  if (emu_arena.base && emu_arena.slot_shift >= shift) return true;
  if (emu_arena.base) munmap(emu_arena.base, emu_arena.bytes);
  emu_arena.slot_shift = shift;
  emu_arena.bytes = uint64_t(kSlots) << shift;
  void* p = mmap(nullptr, emu_arena.bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  emu_arena.base = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  return emu_arena.base != nullptr;
}

#if defined(__APPLE__)
bool in_program(const void* p) {
  Dl_info info;
  return dladdr(p, &info) != 0;
}
#else
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];
bool in_program(const void* p) { return p >= __ehdr_start && p < _end; }
#endif

}  // namespace

bool arena_elsewhere(const void* p, uint64_t bytes) {
  const Fiber* f = emu_current;
  const char* c = static_cast<const char*>(p);
  return (c >= f->stack_low && c + bytes <= f->stack_high) || in_program(p);
}

bool arena_begin(emu_launch* job, void** buffers, bool with_cells) {
  uint64_t largest = kMaxSharedBytes;
  for (uint32_t i = 0; i < job->count; ++i)
    if (job->buffers[i].bytes > largest) largest = job->buffers[i].bytes;
  if (job->count > kBuffers || !map_arena(largest)) {
    job->fault = EMU_UNSUPPORTED;
    snprintf(job->message, sizeof job->message, "no address space for the buffers");
    return false;
  }
  for (Region& r : emu_arena.slots) r.role = UNUSED;
  for (uint32_t i = 0; i < job->count; ++i) {
    const emu_buffer& b = job->buffers[i];
    const Role role = b.role == 0 ? INPUT : b.role == 1 ? OUTPUT : FILLED_OUTPUT;
    Region& r = place_region(i, b.bytes, b.element, role, i, with_cells);
    r.is_float = b.is_float;
    r.constant = b.constant;
    buffers[i] = r.data;
    if (role == OUTPUT) memset(r.data, 0xff, b.bytes);
    else memcpy(r.data, b.data, b.bytes);
  }
  return true;
}

Region& arena_shared(uint32_t id, size_t bytes, size_t element, bool is_float, bool with_cells) {
  Region& r = place_region(kBuffers + id, bytes, element, SHARED, id, with_cells);
  r.is_float = is_float;
  r.constant = false;
  return r;
}

void arena_copy_out(emu_launch* job) {
  for (uint32_t i = 0; i < job->count; ++i) {
    const Region& r = emu_arena.slots[i];
    if (r.role != INPUT) memcpy(job->buffers[i].data, r.data, r.bytes);
  }
}
