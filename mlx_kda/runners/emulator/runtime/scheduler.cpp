// Runs the threads of each threadgroup as fibers: a SIMD operation waits for the lanes of its
// SIMD-group, a barrier for the threadgroup; whoever does not arrive is a divergence.
#include "fiber.h"
#include "state.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <ucontext.h>  // macOS refuses it, and has no use for it here
#endif

Fiber* emu_current;
emu_launch* emu_job;
SharedVariable emu_shared_table[EMU_MAX_SHARED];

static Stacks stacks;
static Fiber fibers[kMaxThreads];
static SimdGroup groups[kMaxThreads / kLanes];
static uint32_t group_count;
static void* scheduler_sp;
static void** kernel_buffers;

[[noreturn]] void raise_at(uint32_t kind, uint32_t line, uint64_t pc, const char* format, ...) {
  emu_launch* job = emu_job;
  job->fault = kind;
  job->line = line;
  job->pc = pc;
  if (emu_current) memcpy(job->thread, emu_current->ids.thread_in_grid, sizeof job->thread);
  va_list args;
  va_start(args, format);
  vsnprintf(job->message, sizeof job->message, format, args);
  va_end(args);
  stop_launch();
}

[[noreturn]] void stop_launch() {
  void* abandoned;
  emu_switch(&abandoned, scheduler_sp);
  abort();
}

extern "C" void emu_raise(uint32_t kind, const char* message, uint32_t line) {
  raise_at(kind, line, 0, "%s", message);
}
extern "C" __attribute__((const)) uint32_t emu_lane() { return emu_current->ids.lane; }

void each_simdgroup(void (*f)(SimdGroup*)) {
  for (uint32_t s = 0; s < group_count; ++s) f(&groups[s]);
}

static void to_scheduler(Fiber* from) { emu_switch(&from->sp, scheduler_sp); }

// Leaves a waiting or finished lane for the next one of its SIMD-group that can run.
static void next_lane(Fiber* from) {
  SimdGroup* g = from->group;
  uint32_t i = from->lane;
  for (uint32_t n = 1; n < g->lanes; ++n) {
    if (++i == g->lanes) i = 0;
    Fiber* to = g->lane[i];
    if (to->state != READY) continue;
    emu_current = to;
    emu_switch(&from->sp, to->sp);
    return;
  }
  to_scheduler(from);
}

static void fiber_main() {
  emu_entry(kernel_buffers, &emu_current->ids);
  check_settle();
  emu_current->state = DONE;
  emu_current->line = 0;
  next_lane(emu_current);
  abort();
}

// Called by a lane at a SIMD operation. Returns true in the lane that came last.
bool meet(SimdGroup* g, Fiber* f, uint32_t op, uint32_t line) {
  check_settle();
  if (g->arrived == 0) {
    g->op = op;
    g->line = line;
    g->trail = f->trail;
  } else if (g->op != op || g->line != line || g->trail != f->trail) {
    raise_at(EMU_DIVERGENCE, line, 0,
             "lanes of one SIMD-group are at different SIMD operations (lines %u and %u)",
             g->line % EMU_LINE_STEP, line % EMU_LINE_STEP);
  }
  if (++g->arrived == g->lanes) {
    g->arrived = 0;
    return true;
  }
  f->state = AT_SIMD;
  f->line = line;
  next_lane(f);
  return false;
}

void release(SimdGroup* g) {
  for (uint32_t i = 0; i < g->lanes; ++i) g->lane[i]->state = READY;
}

extern "C" void emu_barrier(uint32_t flags, uint32_t line) {
  check_settle();
  Fiber* f = emu_current;
  f->state = AT_BARRIER;
  f->line = line;
  f->flags = flags;
  next_lane(f);
}

extern "C" void emu_matrix_access(uint32_t line) {
  emu_current->trail = (emu_current->trail ^ line) * 0x9e3779b97f4a7c15ull + 1;
}

extern "C" void* emu_shared_new(uint32_t id, size_t bytes, size_t element, uint32_t is_float,
                                uint32_t line) {
  SharedVariable& v = emu_shared_table[id];
  if (!v.data) {
    const size_t align = bytes >= 16 ? 16 : 4;
    emu_job->shared_bytes = (emu_job->shared_bytes + align - 1) / align * align + bytes;
    if (emu_job->shared_bytes > kMaxSharedBytes)
      raise_at(EMU_LIMITS, line, 0, "%u bytes of threadgroup memory, the limit is %u",
               emu_job->shared_bytes, kMaxSharedBytes);
    v = {check_shared(id, bytes, element, is_float), bytes, element};
  } else if (v.bytes != bytes) {
    raise_at(EMU_UNSUPPORTED, line, 0, "one threadgroup variable with two sizes (%zu, %zu bytes)",
             v.bytes, bytes);
  }
  return v.data;
}

// True when the launch should go on with the next round of this threadgroup.
static bool step(uint32_t simdgroups, uint32_t threads) {
  for (uint32_t s = 0; s < simdgroups; ++s) {
    SimdGroup& g = groups[s];
    for (uint32_t i = 0; i < g.lanes; ++i) {
      if (g.lane[i]->state != READY) continue;
      emu_current = g.lane[i];
      emu_switch(&scheduler_sp, g.lane[i]->sp);
      if (emu_job->fault) return false;
      break;
    }
    for (uint32_t i = 0; i < g.lanes; ++i) {
      if (g.lane[i]->state != AT_SIMD) continue;
      emu_job->fault = EMU_DIVERGENCE;
      emu_job->line = g.lane[i]->line;
      memcpy(emu_job->thread, g.lane[i]->ids.thread_in_grid, sizeof emu_job->thread);
      snprintf(emu_job->message, sizeof emu_job->message,
               "a SIMD operation that %u of the SIMD-group's %u lanes reach", g.arrived, g.lanes);
      return false;
    }
  }
  const Fiber* waiting = nullptr;
  const Fiber* odd = nullptr;
  uint32_t waiters = 0;
  for (uint32_t i = 0; i < threads; ++i) {
    if (fibers[i].state == DONE) continue;
    ++waiters;
    if (!waiting) waiting = &fibers[i];
    if (fibers[i].line != waiting->line) odd = &fibers[i];
  }
  if (!waiting) return false;
  if (odd || waiters != threads) {
    emu_job->fault = EMU_DIVERGENCE;
    emu_job->line = waiting->line;
    memcpy(emu_job->thread, waiting->ids.thread_in_grid, sizeof emu_job->thread);
    if (odd)
      snprintf(emu_job->message, sizeof emu_job->message,
               "threads wait at different barriers (lines %u and %u)",
               waiting->line % EMU_LINE_STEP, odd->line % EMU_LINE_STEP);
    else
      snprintf(emu_job->message, sizeof emu_job->message,
               "a barrier that %u of the threadgroup's %u threads reach", waiters, threads);
    return false;
  }
  check_barrier(waiting->flags);
  if (emu_job->fault) return false;
  for (uint32_t i = 0; i < threads; ++i) fibers[i].state = READY;
  return true;
}

static void run_group(const uint32_t at[3], const uint32_t groups_per_grid[3]) {
  const emu_launch& job = *emu_job;
  uint32_t size[3];
  for (int a = 0; a < 3; ++a) {
    const uint32_t left = job.grid[a] - at[a] * job.group[a];
    size[a] = left < job.group[a] ? left : job.group[a];
  }
  const uint32_t threads = size[0] * size[1] * size[2];
  const uint32_t simdgroups = (threads + kLanes - 1) / kLanes;
  const uint32_t full = job.group[0] * job.group[1] * job.group[2];
  for (uint32_t s = 0; s < simdgroups; ++s) {
    const uint32_t rest = threads - s * kLanes;
    groups[s].lanes = rest < kLanes ? rest : kLanes;
    groups[s].arrived = groups[s].phase = 0;
    groups[s].barrier_epoch[0] = groups[s].barrier_epoch[1] = groups[s].meet_epoch = 0;
  }
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.group = &groups[i / kLanes];
    f.lane = i % kLanes;
    f.group->lane[f.lane] = &f;
    f.index = i;
    f.state = READY;
    f.trail = f.line = 0;
    f.stack_low = stacks.low(i);
    f.stack_high = f.stack_low + kStackBytes;
    f.sp = stacks.fresh(i, fiber_main);
    const uint32_t in[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int a = 0; a < 3; ++a) {
      f.ids.thread_in_group[a] = in[a];
      f.ids.thread_in_grid[a] = at[a] * job.group[a] + in[a];
      f.ids.group_in_grid[a] = at[a];
      f.ids.groups_per_grid[a] = groups_per_grid[a];
      f.ids.threads_per_grid[a] = job.grid[a];
      f.ids.threads_per_group[a] = size[a];
      f.ids.dispatch_threads[a] = job.group[a];
    }
    f.ids.lane = f.lane;
    f.ids.simdgroup = i / kLanes;
    f.ids.simdgroups = simdgroups;
    f.ids.dispatch_simdgroups = (full + kLanes - 1) / kLanes;
    f.ids.index_in_group = i;
  }
  emu_current = nullptr;
  group_count = simdgroups;
  check_begin_group();
  while (step(simdgroups, threads)) {
  }
  for (uint32_t s = 0; s < simdgroups && !emu_job->fault; ++s)
    for (uint32_t i = 1; i < groups[s].lanes; ++i)
      if (groups[s].lane[i]->trail != groups[s].lane[0]->trail) {
        emu_job->fault = EMU_DIVERGENCE;
        memcpy(emu_job->thread, groups[s].lane[i]->ids.thread_in_grid, sizeof emu_job->thread);
        snprintf(emu_job->message, sizeof emu_job->message,
                 "lanes of one SIMD-group loaded or stored different matrices");
        return;
      }
  if (!emu_job->fault) check_end_group();
}

// A trap in the kernel (a division by zero, in the fast build also an access to no memory) becomes
// a fault of the launch; elsewhere the handlers are those that were there before.
static pthread_t runner;
static struct sigaction handlers_before[3];
static const int trapped[3] = {SIGFPE, SIGSEGV, SIGBUS};

static void on_trap(int signal, siginfo_t*, void* context) {
  if (!emu_current || !pthread_equal(pthread_self(), runner)) {
    for (int i = 0; i < 3; ++i) sigaction(trapped[i], &handlers_before[i], nullptr);
    return;  // comes back, to the handler that it is meant for
  }
  uint64_t pc = 0;
#if defined(__linux__) && defined(__x86_64__)
  pc = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1;
#elif defined(__linux__) && defined(__aarch64__)
  pc = static_cast<ucontext_t*>(context)->uc_mcontext.pc + 1;
#endif
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  if (signal == SIGFPE) raise_at(EMU_UNSUPPORTED, 0, pc, "an integer division by zero");
  raise_at(EMU_OUT_OF_BOUNDS, 0, pc, "an access to no memory at all");
}

static void run_once(emu_launch* job) {
  emu_job = job;
  emu_current = nullptr;
  static void* buffers[64];
  kernel_buffers = buffers;
  memset(emu_shared_table, 0, sizeof emu_shared_table);
  if (!stacks.reserve(kMaxThreads)) {
    job->fault = EMU_UNSUPPORTED;
    snprintf(job->message, sizeof job->message, "no memory for the threads' stacks");
    return;
  }
  check_begin_launch(job, buffers);
  uint32_t n[3];
  for (int a = 0; a < 3; ++a) n[a] = (job->grid[a] + job->group[a] - 1) / job->group[a];
  for (uint32_t z = 0; z < n[2] && !job->fault; ++z)
    for (uint32_t y = 0; y < n[1] && !job->fault; ++y)
      for (uint32_t x = 0; x < n[0] && !job->fault; ++x) {
        const uint32_t at[3] = {x, y, z};
        run_group(at, n);
      }
  emu_current = nullptr;
  check_end_launch(job);
}

extern "C" __attribute__((visibility("default"))) void emu_run(emu_launch* job) {
  struct sigaction action = {};
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO;
  runner = pthread_self();
  for (int i = 0; i < 3; ++i) sigaction(trapped[i], &action, &handlers_before[i]);
  do {
    job->restart = 0;
    run_once(job);
  } while (job->restart);
  for (int i = 0; i < 3; ++i) sigaction(trapped[i], &handlers_before[i], nullptr);
}
