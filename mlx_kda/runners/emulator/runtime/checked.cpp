// The checked build: bounds, races between barriers and between threadgroups, reads of undefined
// memory, outputs left unwritten.
//
// Ordering. Threads of a threadgroup are ordered by a barrier that names the memory; lanes of a
// SIMD-group also by simdgroup_barrier; and a lane's read is ordered before a later write by
// another lane of its SIMD-group if a SIMD operation lies between, because the SIMD-group issues
// its instructions in order. A write that leaves memory as it was is not held against anyone.
#include "shadow.h"

#include <stdio.h>
#include <string.h>

namespace {

constexpr uint32_t kDeviceFlag = 1, kThreadgroupFlag = 2;  // mem_flags
uint32_t epoch[2], first_epoch[2];  // device memory, threadgroup memory
bool want_restart;
constexpr char kNeverWritten[] = "a read of memory nobody has written,";

// A conflicting write, judged once it has happened: no fault if it changed nothing.
struct Pending {
  bool active;
  const void* p;
  uint32_t bytes, line;
  uint64_t pc;
  unsigned char old[64];
  char message[256];
} pending;

// A read of memory nobody has written: a race if another thread writes it before the next barrier
// (the read came first only because threads run in turn here), undefined memory if nobody does.
struct Undefined {
  bool active;
  const Cell* cell;
  uint32_t line, thread[3];
  uint64_t pc;
  char message[256];
} undefined;

const char* place(const Region& r, char* out, size_t n) {
  snprintf(out, n, r.role == SHARED ? "threadgroup variable #%u" : "buffer #%u", r.id);
  return out;
}

void hold(const void* p, uint64_t bytes, uint64_t pc, uint32_t line, const Region& r,
          const char* what) {
  if (pending.active || bytes > sizeof pending.old) return;
  char name[64];
  pending.active = true;
  pending.p = p;
  pending.bytes = uint32_t(bytes);
  pending.pc = pc;
  pending.line = line;
  memcpy(pending.old, p, bytes);
  snprintf(pending.message, sizeof pending.message, "%s at byte %llu of %s", what,
           static_cast<unsigned long long>(static_cast<const char*>(p) - r.data),
           place(r, name, sizeof name));
}

// Who of the threadgroup is asking, with the counts its SIMD-group has reached.
struct Asker {
  uint32_t thread, simdgroup, barriers, meets;
};

bool ordered_write(const Cell& c, const Asker& me) {  // by threads: the last write before me
  const uint32_t thread = who_thread(c.write_who);
  if (thread == me.thread) return true;
  return thread / kLanes == me.simdgroup && who_count(c.write_who) != (me.barriers & 0xfffff);
}

bool ordered_reads(const Cell& c, const Asker& me) {
  const uint32_t kind = who_kind(c.read_who), thread = who_thread(c.read_who);
  if (kind == MANY) return false;
  if (kind == ONE && thread == me.thread) return true;
  return thread / kLanes == me.simdgroup && who_count(c.read_who) != (me.meets & 0xfffff);
}

void note_read(Cell& c, const Asker& me, uint32_t now) {
  const uint32_t mine = pack_who(me.thread, ONE, me.meets & 0xfffff);
  if (c.read_epoch != now) {
    c.read_epoch = now;
    c.read_who = mine;
    return;
  }
  const uint32_t kind = who_kind(c.read_who), thread = who_thread(c.read_who);
  if (kind == MANY) return;
  if (thread / kLanes != me.simdgroup) c.read_who = pack_who(thread, MANY, 0);
  else if (who_count(c.read_who) != (me.meets & 0xfffff)) c.read_who = mine;
  else if (thread != me.thread) c.read_who = pack_who(thread, LANES, me.meets & 0xfffff);
}

[[noreturn]] void fault(uint32_t kind, const Region& r, const void* p, uint64_t pc, uint32_t line,
                        const char* what) {
  char name[64];
  raise_at(kind, line, pc, "%s at byte %lld of %s (%llu bytes)", what,
           static_cast<long long>(static_cast<const char*>(p) - r.data),
           place(r, name, sizeof name), static_cast<unsigned long long>(r.bytes));
}

void note_undefined(const Cell& c, const Region& r, const void* p, uint64_t pc, uint32_t line) {
  if (undefined.active) return;
  char name[64];
  undefined.active = true;
  undefined.cell = &c;
  undefined.pc = pc;
  undefined.line = line;
  memcpy(undefined.thread, emu_current->ids.thread_in_grid, sizeof undefined.thread);
  snprintf(undefined.message, sizeof undefined.message, "at byte %lld of %s",
           static_cast<long long>(static_cast<const char*>(p) - r.data),
           place(r, name, sizeof name));
}

// Reports the undefined read that was noted, as a fault of this kind; does not switch fibers.
void report_undefined(uint32_t kind, const char* what) {
  emu_launch* job = emu_job;
  undefined.active = false;
  job->fault = kind;
  job->line = undefined.line;
  job->pc = undefined.pc;
  memcpy(job->thread, undefined.thread, sizeof job->thread);
  snprintf(job->message, sizeof job->message, "%s %s", what, undefined.message);
}

void check_cells(Region& r, const void* p, uint64_t offset, uint64_t bytes, Access access,
                 uint64_t pc, uint32_t line) {
  const Fiber* f = emu_current;
  const int space = r.role == SHARED;
  const SimdGroup* g = f->group;
  const Asker me = {f->index, f->index / kLanes, g->barrier_epoch[space], g->meet_epoch};
  const uint32_t now = epoch[space], first = first_epoch[space];
  const bool writes = access == WRITE || access == ATOMIC_WRITE || access == ATOMIC_UPDATE;
  const bool reads = access != WRITE && access != ATOMIC_WRITE;
  const bool atomic = access >= ATOMIC_READ;
  if (writes && bytes < (1ull << r.shift)) {
    r.finer = want_restart = true;
    raise_at(EMU_UNSUPPORTED, line, pc, "a write smaller than an element");
  }
  const uint64_t last = (offset + bytes - 1) >> r.shift;
  for (uint64_t i = offset >> r.shift; i <= last; ++i) {
    Cell& c = r.cells[i];
    const bool by_atomic = c.write_epoch && who_kind(c.write_who) == ATOMIC;
    if (reads) {
      if (c.write_epoch < first && r.role != FILLED_OUTPUT && (space || c.write_epoch == 0))
        note_undefined(c, r, p, pc, line);
      if (!(atomic && by_atomic) && c.write_epoch) {
        if (c.write_epoch < first && !space)
          fault(EMU_RACE, r, p, pc, line, "a read of what another threadgroup wrote");
        if (c.write_epoch == now && !ordered_write(c, me))
          fault(EMU_RACE, r, p, pc, line,
                "a read of what another thread wrote, with no barrier between,");
      }
      if (!atomic) note_read(c, me, now);
    }
    if (writes) {
      if (__builtin_expect(undefined.active && undefined.cell == &c, 0) &&
          c.read_epoch == now && !ordered_reads(c, me)) {
        report_undefined(EMU_RACE, "a read of what another thread writes, with no barrier between,");
        stop_launch();
      }
      if (!(atomic && by_atomic) && c.write_epoch && !pending.active) {
        if (c.write_epoch < first && !space)
          hold(p, bytes, pc, line, r, "a write over what another threadgroup wrote");
        else if (c.write_epoch == now && !ordered_write(c, me))
          hold(p, bytes, pc, line, r,
               "a write over what another thread wrote, with no barrier between,");
      }
      if (c.read_epoch && !pending.active) {
        if (c.read_epoch < first && !space)
          hold(p, bytes, pc, line, r, "a write over what another threadgroup read");
        else if (c.read_epoch == now && !ordered_reads(c, me))
          hold(p, bytes, pc, line, r,
               "a write over what another thread read, with no barrier between,");
      }
      c.write_epoch = now;
      c.write_who = pack_who(me.thread, atomic ? ATOMIC : 0, me.barriers & 0xfffff);
    }
  }
}
}  // namespace

void check_access(const void* p, uint64_t bytes, Access access, uint64_t pc, uint32_t line) {
  if (__builtin_expect(pending.active, 0)) check_settle();
  const uint64_t at = static_cast<const char*>(p) - emu_arena.base;
  if (__builtin_expect(at < emu_arena.bytes, 1)) {
    Region& r = emu_arena.slots[at >> emu_arena.slot_shift];
    const uint64_t offset = at & ((1ull << emu_arena.slot_shift) - 1);
    if (__builtin_expect(r.role == UNUSED || offset + bytes > r.bytes, 0)) {
      // Past the middle of a slot it is more likely the next object, entered from below.
      Region& next = emu_arena.slots[(at >> emu_arena.slot_shift) + 1];
      const bool below = offset > (1ull << emu_arena.slot_shift) / 2 && next.role != UNUSED;
      Region& named = below ? next : r;
      if (undefined.active) {  // an index made of garbage
        report_undefined(EMU_UNINITIALISED, kNeverWritten);
        stop_launch();
      }
      if (named.role == UNUSED)
        raise_at(EMU_OUT_OF_BOUNDS, line, pc, "an access far outside every buffer");
      fault(EMU_OUT_OF_BOUNDS, named, p, pc, line,
            access == READ || access == ATOMIC_READ ? "a read" : "a write");
    }
    if (r.role != INPUT) return check_cells(r, p, offset, bytes, access, pc, line);
    if (access == READ || access == ATOMIC_READ) return;
    fault(EMU_OUT_OF_BOUNDS, r, p, pc, line, "a write into an input");
  }
  if (arena_elsewhere(p, bytes)) return;
  raise_at(EMU_OUT_OF_BOUNDS, line, pc, "an access far outside every buffer");
}

extern "C" void emu_atomic_access(const void* p, uint32_t bytes, uint32_t writes, uint32_t line) {
  const Access access = writes == 0 ? ATOMIC_READ : writes == 1 ? ATOMIC_UPDATE : ATOMIC_WRITE;
  check_access(p, bytes, access, 0, line);
}

void check_settle() {
  if (!pending.active) return;
  pending.active = false;
  if (memcmp(pending.old, pending.p, pending.bytes) == 0) return;
  raise_at(EMU_RACE, pending.line, pending.pc, "%s", pending.message);
}

void check_begin_launch(emu_launch* job, void** buffers) {
  epoch[0] = epoch[1] = 1;
  pending.active = undefined.active = want_restart = false;
  arena_begin(job, buffers, true);
}

void* check_shared(uint32_t id, size_t bytes, size_t element, bool is_float) {
  Region& r = arena_shared(id, bytes, element, is_float, true);
  memset(r.data, 0xff, bytes);
  return r.data;
}

void check_begin_group() {
  for (int space = 0; space < 2; ++space) first_epoch[space] = ++epoch[space];
  for (uint32_t id = 0; id < EMU_MAX_SHARED; ++id) {
    const Region& r = emu_arena.slots[64 + id];
    if (r.role == SHARED) memset(r.data, 0xff, r.bytes);
  }
}

void check_barrier(uint32_t flags) {
  if (undefined.active) return report_undefined(EMU_UNINITIALISED, kNeverWritten);
  if (flags & kDeviceFlag) ++epoch[0];
  if (flags & kThreadgroupFlag) ++epoch[1];
}

void check_simd(SimdGroup* g, uint32_t op, uint32_t argument) {
  ++g->meet_epoch;
  if (op != EMU_SIMD_BARRIER) return;
  if (argument & kDeviceFlag) ++g->barrier_epoch[0];
  if (argument & kThreadgroupFlag) ++g->barrier_epoch[1];
}

void check_end_group() {
  if (undefined.active) report_undefined(EMU_UNINITIALISED, kNeverWritten);
}

void check_end_launch(emu_launch* job) {
  if (want_restart) {
    job->fault = EMU_OK;
    job->shared_bytes = 0;
    job->restart = 1;
    return;
  }
  for (Region& r : emu_arena.slots) r.finer = false;
  if (job->fault) return;
  arena_copy_out(job);
  for (uint32_t i = 0; i < job->count; ++i) {
    Region& r = emu_arena.slots[i];
    if (r.role != OUTPUT) continue;
    uint64_t missing = 0, where = 0;
    const uint64_t cells = r.bytes >> r.shift;
    for (uint64_t c = cells; c-- > 0;)
      if (!r.cells[c].write_epoch) ++missing, where = c;
    if (!missing) continue;
    job->fault = EMU_UNWRITTEN;
    snprintf(job->message, sizeof job->message,
             "%llu of %llu elements of buffer #%u were never written, the first is number %llu",
             static_cast<unsigned long long>(missing), static_cast<unsigned long long>(cells), i,
             static_cast<unsigned long long>(where));
    return;
  }
}
