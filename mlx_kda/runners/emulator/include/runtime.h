// The interface between a compiled kernel and the emulator's runtime.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum emu_op : uint32_t {
  EMU_SUM, EMU_PRODUCT, EMU_MIN, EMU_MAX, EMU_AND, EMU_OR, EMU_XOR,
  EMU_PREFIX_SUM, EMU_PREFIX_PRODUCT, EMU_PREFIX_SUM_EXCLUSIVE, EMU_PREFIX_PRODUCT_EXCLUSIVE,
  EMU_SHUFFLE, EMU_SHUFFLE_XOR, EMU_SHUFFLE_UP, EMU_SHUFFLE_DOWN, EMU_ROTATE_UP, EMU_ROTATE_DOWN,
  EMU_BALLOT, EMU_SIMD_BARRIER, EMU_MMA, EMU_MATRIX_ACCESS,
  EMU_QUAD = 0x100,  // added to an operation that works on four lanes
};
enum emu_type : uint32_t {
  EMU_F32, EMU_F16, EMU_BF16, EMU_I32, EMU_U32, EMU_I16, EMU_U16, EMU_I8, EMU_U8, EMU_I64, EMU_U64,
};
enum emu_fault_kind : uint32_t {
  EMU_OK, EMU_OUT_OF_BOUNDS, EMU_RACE, EMU_DIVERGENCE, EMU_UNINITIALISED, EMU_UNWRITTEN,
  EMU_LIMITS, EMU_UNSUPPORTED,
};
// What the counting build's arithmetic notes; anything from EMU_N_COUNTERS on is free.
enum emu_counter : uint32_t {
  EMU_N_fma, EMU_N_add, EMU_N_mul, EMU_N_division, EMU_N_minmax, EMU_N_compare, EMU_N_special,
  EMU_N_matrix16,  // 16-bit elements moved by matrix loads and stores, which convert nothing
  EMU_N_COUNTERS, EMU_N_none,
};
constexpr uint32_t EMU_LINE_STEP = 100000;  // LINE_STEP of rewrite.py
constexpr int EMU_MAX_SHARED = 64;  // threadgroup variables of one kernel

// Where a thread is: filled by the runtime, read by the generated entry point.
struct emu_ids {
  uint32_t thread_in_grid[3], thread_in_group[3], group_in_grid[3];
  uint32_t groups_per_grid[3], threads_per_grid[3], threads_per_group[3], dispatch_threads[3];
  uint32_t lane, simdgroup, simdgroups, dispatch_simdgroups, index_in_group;
};

extern "C" {
// Defined by the kernel.
void emu_entry(void* const* buffers, const emu_ids* ids);

// Defined by the runtime. `line` is the line of the generated text.
extern uint64_t emu_counts[EMU_N_COUNTERS];
void* emu_shared_new(uint32_t id, size_t bytes, size_t element, uint32_t is_float,
                     uint32_t line);
uint64_t emu_simd(uint32_t op, uint32_t type, uint64_t value, uint32_t argument, uint32_t line);
uint64_t emu_mma(uint64_t a, uint64_t b, uint64_t c, uint32_t line);
void emu_barrier(uint32_t flags, uint32_t line);
void emu_matrix_access(uint32_t line);
void emu_atomic_access(const void* p, uint32_t bytes, uint32_t writes, uint32_t line);
[[noreturn]] void emu_raise(uint32_t kind, const char* message, uint32_t line);
}
