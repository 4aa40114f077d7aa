// What the runtime knows of a launch: threads, SIMD-groups, buffers, the fault if there was one.
#pragma once
#include "../include/runtime.h"
#include <stddef.h>

constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kLanes = 32;
constexpr uint32_t kMaxSharedBytes = 32768;

// Shared with launch.py (ctypes): keep the order of the fields.
struct emu_buffer {
  void* data;
  uint64_t bytes;
  uint32_t element;      // bytes of an element
  uint32_t role;         // 0 input, 1 output, 2 output that init_value has filled
  uint32_t is_float;     // of a floating type
  uint32_t constant;     // in the constant address space
};
struct emu_launch {
  emu_buffer* buffers;
  uint32_t count;
  uint32_t grid[3], group[3];
  // results
  uint32_t fault;        // emu_fault_kind
  uint32_t line;         // of the generated text, 0 if only pc is known
  uint64_t pc;           // of the access, 0 if only line is known
  uint32_t thread[3];    // thread_position_in_grid
  uint32_t shared_bytes;
  uint32_t restart;      // set by a build that must run the launch again, more finely
  uint64_t counters[64];
  char message[512];
};

struct SimdGroup;
enum State : uint8_t { READY, AT_SIMD, AT_BARRIER, DONE };

struct Fiber {
  void* sp;
  SimdGroup* group;
  State state;
  uint16_t lane, index;
  uint32_t line;      // where it waits
  uint32_t flags;     // of the barrier it waits at
  uint64_t trail;     // hash of the SIMD operations that need no exchange
  char *stack_low, *stack_high;
  emu_ids ids;
};

struct SimdGroup {
  Fiber* lane[kLanes];
  uint32_t lanes, arrived, next;
  uint32_t op, line;            // of the operation being gathered
  uint32_t phase;               // which half of the buffers it uses
  uint64_t trail;
  uint32_t barrier_epoch[2], meet_epoch;  // device and threadgroup memory; any SIMD operation
  uint64_t in[2][3][kLanes], out[2][kLanes];
};

struct SharedVariable { void* data; size_t bytes, element; };

extern Fiber* emu_current;
extern emu_launch* emu_job;
extern SharedVariable emu_shared_table[EMU_MAX_SHARED];

// The parts that only the checked and counting builds have; empty in the fast one.
void check_begin_launch(emu_launch* job, void** buffers);
void check_end_launch(emu_launch* job);
void check_begin_group();
void check_barrier(uint32_t flags);
void check_simd(SimdGroup* g, uint32_t op, uint32_t argument);
void check_end_group();
void check_settle();                       // judges a write that conflicted unless it changed nothing
void* check_shared(uint32_t id, size_t bytes, size_t element, bool is_float);
void each_simdgroup(void (*f)(SimdGroup*));  // of the running threadgroup
[[noreturn]] void stop_launch();           // back to the scheduler for good
[[noreturn]] void raise_at(uint32_t kind, uint32_t line, uint64_t pc, const char* format, ...);
