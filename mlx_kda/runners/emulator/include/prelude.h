// Everything a kernel's text may use, in the order in which MLX provides it.
#pragma once
#include "atomic.h"
#include "matrix.h"

namespace metal {
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A> void log_debug(const char*, A...) const {}
};
}  // namespace metal

// Address spaces: the emulator tells them apart by address at run time, the front-end check by
// type. `threadgroup` variables are rewritten before the compiler sees them.
#define device
#define constant
#define thread
#define threadgroup
#define kernel
#ifdef EMU_COUNT
#define float emu_float
#endif
#include "mlx/backend/metal/kernels/utils.h"
