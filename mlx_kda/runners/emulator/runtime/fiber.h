// Fibers: one stack a thread of the threadgroup, switched in a few instructions.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

extern "C" void emu_switch(void** save, void* load);

#if defined(__APPLE__)
#define EMU_SYMBOL "_emu_switch"
#else
#define EMU_SYMBOL "emu_switch"
#endif

#if defined(__x86_64__)
asm(".text\n.globl " EMU_SYMBOL "\n" EMU_SYMBOL ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr int kSavedWords = 7;  // six registers and the return address
constexpr int kReturnWord = 6;
#elif defined(__aarch64__)
asm(".text\n.globl " EMU_SYMBOL "\n.p2align 2\n" EMU_SYMBOL ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
constexpr int kSavedWords = 20;
constexpr int kReturnWord = 11;  // x30
#else
#error "the emulator switches stacks on x86-64 and arm64 only"
#endif

constexpr size_t kStackBytes = 256 << 10;

struct Stacks {
  char* base = nullptr;
  size_t count = 0;

  // Keeps the stacks of earlier launches: fresh pages cost more than the emulation of a small kernel.
  bool reserve(size_t n) {
    if (n <= count) return true;
    if (base) munmap(base, count * kStackBytes);
    void* p = mmap(nullptr, n * kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    count = base ? n : 0;
    return base != nullptr;
  }
  char* low(size_t i) const { return base + i * kStackBytes; }

  // A stack pointer from which emu_switch enters `entry`. Stacks start at different offsets in
  // their pages, or those of one SIMD-group would all fall into the same cache sets.
  void* fresh(size_t i, void (*entry)()) const {
    char* top = low(i) + kStackBytes - 64 - (i % 32) * 1088 % 4096 / 64 * 64;
    auto* sp = reinterpret_cast<uint64_t*>(top);
#if defined(__x86_64__)
    *--sp = 0;  // keeps the stack aligned as after a call
#endif
    sp -= kSavedWords;
    for (int w = 0; w < kSavedWords; ++w) sp[w] = 0;
    sp[kReturnWord] = reinterpret_cast<uint64_t>(entry);
    return sp;
  }
};
