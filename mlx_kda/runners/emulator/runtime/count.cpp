// The counting build: what a launch asks of the GPU, a SIMD-group's instruction at a time.
//
// Arithmetic. Between two SIMD operations the lanes of a SIMD-group run the same instructions, some
// perhaps idle: an instruction is counted once, so the lane with the most decides.
// Memory. The n-th access of each lane at one place in the code is one instruction of the
// SIMD-group; it asks for every byte once, however many lanes want it.
#include "shadow.h"

#include <string.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

uint64_t emu_counts[EMU_N_COUNTERS];

namespace {

// Shared with counts.py: keep the order.
enum Total {
  FMA, ADD, MUL, DIVISION, MINMAX, COMPARE, SPECIAL, MATRIX16, CONVERT, MMA, SHUFFLE, SIMD_REDUCE,
  SIMD_SCAN, SIMD_VOTE, SIMD_BARRIER, BARRIER, DEVICE_BYTES, DEVICE_LANE_BYTES, UNIQUE_READ,
  UNIQUE_WRITTEN, CONSTANT_BYTES, SHARED_BYTES, DEVICE_ACCESSES, SHARED_ACCESSES, GROUPS,
  SIMDGROUPS, TOTALS
};
static_assert(MATRIX16 == EMU_N_matrix16 && TOTALS <= 64, "the arithmetic counters come first");

uint64_t totals[TOTALS];

struct Touch { uint64_t at; uint32_t bytes; };
struct Site {  // one load or store in the code, as one SIMD-group runs it
  Role role;
  bool constant, converts;
  std::vector<Touch> lanes[kLanes];
};
struct Tally {
  uint64_t lane[kLanes][EMU_N_COUNTERS];
  std::unordered_map<uint64_t, Site> sites;
};
std::unordered_map<const SimdGroup*, Tally> tallies;
std::vector<bool> touched[kSlots][2];  // bytes of each buffer read, written

uint64_t distinct_bytes(std::vector<Touch>& t) {
  std::sort(t.begin(), t.end(), [](const Touch& a, const Touch& b) { return a.at < b.at; });
  uint64_t sum = 0, end = 0;
  for (const Touch& x : t) {
    const uint64_t from = std::max(end, x.at), to = x.at + x.bytes;
    if (to > from) sum += to - from;
    end = std::max(end, to);
  }
  return sum;
}

void count_site(Site& s) {
  std::vector<Touch> together;
  for (size_t n = 0;; ++n) {
    together.clear();
    for (auto& lane : s.lanes)
      if (n < lane.size()) together.push_back(lane[n]);
    if (together.empty()) break;
    const uint64_t bytes = distinct_bytes(together);
    if (s.converts) ++totals[CONVERT];
    if (s.role == SHARED) {
      totals[SHARED_BYTES] += bytes;
      ++totals[SHARED_ACCESSES];
    } else if (s.constant) {
      totals[CONSTANT_BYTES] += bytes;
    } else {
      totals[DEVICE_BYTES] += bytes;
      ++totals[DEVICE_ACCESSES];
      for (const Touch& t : together) totals[DEVICE_LANE_BYTES] += t.bytes;
    }
  }
  for (auto& lane : s.lanes) lane.clear();
}

// Closes the stretch that a SIMD-group's lanes have run since they last met.
void close(SimdGroup* g) {
  Tally& t = tallies[g];
  for (uint32_t c = 0; c < EMU_N_COUNTERS; ++c) {
    int64_t most = 0;
    for (auto& lane : t.lane) most = std::max(most, int64_t(lane[c]));
    totals[c] += most;
  }
  memset(t.lane, 0, sizeof t.lane);
  for (auto& site : t.sites) count_site(site.second);
}

void mark(Region& r, uint64_t offset, uint64_t bytes, bool write) {
  std::vector<bool>& bits = touched[&r - emu_arena.slots][write];
  if (bits.size() < r.bytes) bits.resize(r.bytes);
  std::fill(bits.begin() + offset, bits.begin() + offset + bytes, true);
}
}  // namespace

void check_access(const void* p, uint64_t bytes, Access access, uint64_t pc, uint32_t line) {
  const uint64_t at = static_cast<const char*>(p) - emu_arena.base;
  if (at >= emu_arena.bytes) return;
  Region& r = emu_arena.slots[at >> emu_arena.slot_shift];
  const uint64_t offset = at & ((1ull << emu_arena.slot_shift) - 1);
  if (r.role == UNUSED || offset + bytes > r.bytes)
    raise_at(EMU_OUT_OF_BOUNDS, line, pc, "an access outside every buffer");
  const bool write = access == WRITE || access == ATOMIC_WRITE || access == ATOMIC_UPDATE;
  Site& s = tallies[emu_current->group].sites[pc + line];
  s.role = r.role;
  s.constant = r.constant;
  s.converts = r.is_float && bytes == 2;
  s.lanes[emu_current->lane].push_back({at, uint32_t(bytes)});
  if (r.role != SHARED && !r.constant) mark(r, offset, bytes, write);
}

extern "C" void emu_atomic_access(const void* p, uint32_t bytes, uint32_t writes, uint32_t line) {
  check_access(p, bytes, writes ? ATOMIC_UPDATE : ATOMIC_READ, uint64_t(line) << 32, line);
}

// Called by the running thread wherever it stops: hands its counts over.
void check_settle() {
  Tally& t = tallies[emu_current->group];
  for (uint32_t c = 0; c < EMU_N_COUNTERS; ++c) t.lane[emu_current->lane][c] += emu_counts[c];
  memset(emu_counts, 0, sizeof emu_counts);
}

void check_simd(SimdGroup* g, uint32_t op, uint32_t) {
  close(g);
  op &= ~uint32_t(EMU_QUAD);
  if (op == EMU_MMA) ++totals[MMA];
  else if (op == EMU_SIMD_BARRIER) ++totals[SIMD_BARRIER];
  else if (op == EMU_BALLOT || (op >= EMU_AND && op <= EMU_XOR)) ++totals[SIMD_VOTE];
  else if (op <= EMU_MAX) ++totals[SIMD_REDUCE];
  else if (op < EMU_SHUFFLE) ++totals[SIMD_SCAN];
  else ++totals[SHUFFLE];
}

void check_barrier(uint32_t) {
  each_simdgroup([](SimdGroup* g) {
    close(g);
    ++totals[BARRIER];
  });
}

void check_begin_group() { ++totals[GROUPS]; }
void check_end_group() {
  each_simdgroup([](SimdGroup* g) {
    close(g);
    ++totals[SIMDGROUPS];
  });
}

void check_begin_launch(emu_launch* job, void** buffers) {
  memset(totals, 0, sizeof totals);
  memset(emu_counts, 0, sizeof emu_counts);
  tallies.clear();
  for (auto& slot : touched)
    for (auto& bits : slot) bits.clear();
  arena_begin(job, buffers, false);
}

void* check_shared(uint32_t id, size_t bytes, size_t element, bool is_float) {
  return arena_shared(id, bytes, element, is_float, false).data;
}

void check_end_launch(emu_launch* job) {
  if (job->fault) return;
  arena_copy_out(job);
  for (auto& slot : touched)
    for (int write = 0; write < 2; ++write)
      totals[write ? UNIQUE_WRITTEN : UNIQUE_READ] +=
          std::count(slot[write].begin(), slot[write].end(), true);
  // Elements of 16 bits that matrix operations move stay as they are.
  totals[CONVERT] -= std::min(totals[CONVERT], totals[MATRIX16]);
  std::copy(totals, totals + TOTALS, job->counters);
}
