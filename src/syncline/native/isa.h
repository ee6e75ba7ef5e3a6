/* The instruction sets for which kernels are compiled, and the choice of one at run time.
 *
 * A kernel is plain C in a header, which `each_isa.h` includes once for each instruction set. The compiler vectorizes
 * its loops. Each of the compiled copies gets a suffix, by FN(name).
 */

#ifndef SYNCLINE_ISA_H
#define SYNCLINE_ISA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define EXPORT __attribute__((visibility("default")))

#define FN_(name, isa) name##_##isa
#define FN__(name, isa) FN_(name, isa)
#define FN(name) FN__(name, ISA)

/* Before a loop whose iterations do not depend on each other, although its pointers may be equal. */
#if defined(__clang__)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define IVDEP _Pragma("GCC ivdep")
#else
#define IVDEP
#endif

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2")))
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq"
#if defined(__clang__) /* clang ignores a whole target attribute of which it does not know a part */
#define TARGET_AVX512 __attribute__((target(AVX512), min_vector_width(512)))
#else
#define TARGET_AVX512 __attribute__((target(AVX512 ",prefer-vector-width=512")))
#endif

/* Return whether the processor has all of these features of leaf 7, and the system saves these registers.
 *
 * Not __builtin_cpu_supports: it asks the compiler's runtime library, and the one of zig 0.17 finds no feature at all. */
static inline bool has_features(unsigned features, uint32_t registers) {
    unsigned a, b, c, d;
    uint32_t saved, saved_high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & registers) != registers || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (b & features) == features;
}

enum { YMM = 0x6, ZMM = 0xe6 }; /* bits of the register XCR0 */
#endif

static inline int ask_for_instruction_sets(void) {
    int num_supported = 1;
#if defined(__x86_64__)
    if (has_features(bit_AVX2, YMM)) num_supported++;
    if (has_features(bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ, ZMM)) num_supported++;
#endif
    return num_supported;
}

/* Return how many instruction sets of `each_isa.h` this processor has. If it has one, it has the earlier ones, too.
 *
 * The answer is kept, because a virtual machine takes tens of microseconds to ask its processor. */
static inline int count_instruction_sets(void) {
    static atomic_int num_supported; /* threads that ask at once write the same number */
    int known = atomic_load_explicit(&num_supported, memory_order_relaxed);
    if (known == 0) {
        known = ask_for_instruction_sets();
        atomic_store_explicit(&num_supported, known, memory_order_relaxed);
    }
    return known;
}

#endif
