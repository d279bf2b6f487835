/* futex.h - sleep on a 32-bit word that other processes may map, and wake its sleepers. Thread
 * rule: any. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while *word == expected, at most `timeout_ns`. Returns on a wake, timeout, signal or
 * changed word, so the caller checks the word again. */
void sw_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns);

/* Wakes all sleepers of `word`. */
void sw_futex_wake_all(_Atomic uint32_t *word);

/* One step of a spin loop: tells the core that it is waiting. */
static inline void sw_spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
