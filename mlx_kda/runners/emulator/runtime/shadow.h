// The memory a checked launch may touch, and what is known of every piece of it.
//
// Each buffer and each threadgroup variable lies in a slot of its own of one large mapping, far
// from its neighbours: the slot of an address is a shift, and an access outside the object in the
// slot is out of bounds. Outputs and threadgroup variables have a cell for each granule (an
// element, at most four bytes).
#pragma once
#include "state.h"

// Who touched a granule last. Epochs number the intervals between barriers over the whole launch
// (0: never), so that an epoch before the threadgroup's first belongs to another threadgroup.
// `who` packs: thread 10 bits, kind 2 bits, 20 bits of the SIMD-group's own count.
struct Cell {
  uint32_t write_epoch, write_who;
  uint32_t read_epoch, read_who;
};
enum Readers : uint32_t { ONE = 0, LANES = 1, MANY = 2 };  // threads that read since the barrier
constexpr uint32_t ATOMIC = 3;                             // kind of an atomic write

inline uint32_t pack_who(uint32_t thread, uint32_t kind, uint32_t count) {
  return thread | kind << 10 | count << 12;
}
inline uint32_t who_thread(uint32_t who) { return who & 1023; }
inline uint32_t who_kind(uint32_t who) { return who >> 10 & 3; }
inline uint32_t who_count(uint32_t who) { return who >> 12; }

enum Role : uint32_t { UNUSED, INPUT, OUTPUT, FILLED_OUTPUT, SHARED };

struct Region {
  uint64_t bytes;
  Role role;
  uint32_t shift;   // log2 of the granule
  uint32_t id;      // number of the buffer or of the threadgroup variable
  bool is_float, constant;
  bool finer;       // was written in pieces smaller than an element: one byte a granule
  Cell* cells;
  char* data;
};

constexpr uint32_t kSlots = 64 + EMU_MAX_SHARED;

struct Arena {
  char* base = nullptr;
  uint64_t bytes = 0;
  uint32_t slot_shift = 0;
  Region slots[kSlots];
};
extern Arena emu_arena;

// Maps the buffers of a launch and copies them in; false (and the job's fault) if that fails.
bool arena_begin(emu_launch* job, void** buffers, bool with_cells);
Region& arena_shared(uint32_t id, size_t bytes, size_t element, bool is_float, bool with_cells);
void arena_copy_out(emu_launch* job);
// Memory of the thread itself: its stack, or a table of the program.
bool arena_elsewhere(const void* p, uint64_t bytes);

enum Access : uint32_t { READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC_UPDATE };

// Judges one access. `pc` is where it happens, or `line` if that is what is known.
void check_access(const void* p, uint64_t bytes, Access access, uint64_t pc, uint32_t line);
