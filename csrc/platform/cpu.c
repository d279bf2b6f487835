/* cpu.c - on x86-64 a feature needs the processor (cpuid) and an operating system that saves its
 * registers (xgetbv); on aarch64 the kernel says what a program may use (getauxval).
 *
 * cpuid is read by hand because not every compiler's __builtin_cpu_supports() knows "f16c".
 */
#include "platform/cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <stdatomic.h>
#include <stdint.h>

enum {
    LEAF1_ECX_FMA = 1 << 12,
    LEAF1_ECX_SSE42 = 1 << 20,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_AVX = 1 << 28,
    LEAF1_ECX_F16C = 1 << 29,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512BW = 1 << 30,
    STATE_YMM = 0x06, /* xmm and the upper halves of ymm */
    STATE_ZMM = 0xe6, /* the same, the mask registers, the upper halves of zmm, zmm16 to zmm31 */
};
static const uint32_t LEAF7_EBX_AVX512VL = UINT32_C(1) << 31;

/* Assembly, because _xgetbv() would need -mxsave for the whole file. */
static uint32_t enabled_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has(uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t state)
{
    uint32_t eax, ebx, ecx, edx;
    leaf1_ecx |= LEAF1_ECX_OSXSAVE;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf1_ecx) != leaf1_ecx)
        return false;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (ebx & leaf7_ebx) != leaf7_ebx)
        return false;
    return (enabled_state() & state) == state;
}

bool sw_cpu_has_crc32c(void)
{
    uint32_t eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & LEAF1_ECX_SSE42) != 0;
}

bool sw_cpu_has_avx2_f16c_fma(void)
{
    return has(LEAF1_ECX_AVX | LEAF1_ECX_F16C | LEAF1_ECX_FMA, LEAF7_EBX_AVX2, STATE_YMM);
}

static bool is_amd(void)
{
    uint32_t eax, ebx = 0, ecx = 0, edx = 0; /* "AuthenticAMD" */
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == 0x68747541u && edx == 0x69746e65u &&
           ecx == 0x444d4163u;
}

bool sw_prefetches(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int kept;
    int answer = atomic_load_explicit(&kept, memory_order_relaxed);
    if (answer == UNKNOWN) {
        answer = is_amd() ? NO : YES;
        atomic_store_explicit(&kept, answer, memory_order_relaxed);
    }
    return answer == YES;
}

bool sw_cpu_has_avx512(void)
{
    uint32_t leaf7_ebx = LEAF7_EBX_AVX512VL | LEAF7_EBX_AVX2 | LEAF7_EBX_AVX512F |
                         LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW;
    return has(LEAF1_ECX_AVX | LEAF1_ECX_F16C | LEAF1_ECX_FMA, leaf7_ebx, STATE_ZMM);
}

#else

#if defined(__aarch64__)

#include <sys/auxv.h>

bool sw_cpu_has_crc32c(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

#else

bool sw_cpu_has_crc32c(void)
{
    return false;
}

#endif

bool sw_prefetches(void)
{
    return true;
}

#endif
