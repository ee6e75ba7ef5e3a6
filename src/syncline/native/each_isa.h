/* Include the header KERNELS once for each instruction set, with ISA (a suffix) and ISA_TARGET (an attribute) defined.
 *
 * The tables of kernels in the including file list the instruction sets in the same order.
 */

#define ISA baseline
#define ISA_TARGET
#include KERNELS
#undef ISA
#undef ISA_TARGET

#if defined(__x86_64__)
#define ISA avx2
#define ISA_TARGET TARGET_AVX2
#include KERNELS
#undef ISA
#undef ISA_TARGET

#define ISA avx512
#define ISA_TARGET TARGET_AVX512
#include KERNELS
#undef ISA
#undef ISA_TARGET
#endif

#undef KERNELS
