/* Element-wise reductions of N arrays, in rank order.
 *
 * This file is included once per instruction set, by `each_isa.h`. fp16 and bf16 are accumulated in fp32 and rounded
 * once, to the nearest even; max and min propagate NaN; sums and products of integers wrap around.
 */

#include "half.h"

#define SAME(x) (x)

#define LOOPS(T, ACC, LOAD, STORE, COMBINE, FINISH)                                                                \
    if (num_sources == 2) {                                                                                        \
        const T *first = sources[0], *second = sources[1];                                                         \
        IVDEP for (size_t i = 0; i < numel; i++) {                                                                 \
            ACC acc = LOAD(first[i]), x = LOAD(second[i]);                                                         \
            acc = COMBINE;                                                                                         \
            to[i] = STORE(FINISH);                                                                                 \
        }                                                                                                          \
        return;                                                                                                    \
    }                                                                                                              \
    for (size_t from = 0; from < numel; from += BLOCK_NUMEL) {                                                     \
        size_t n = numel - from < BLOCK_NUMEL ? numel - from : BLOCK_NUMEL;                                        \
        ACC block[BLOCK_NUMEL];                                                                                    \
        const T *source = (const T *)sources[0] + from;                                                            \
        for (size_t i = 0; i < n; i++) block[i] = LOAD(source[i]);                                                 \
        for (int s = 1; s < num_sources; s++) {                                                                    \
            source = (const T *)sources[s] + from;                                                                 \
            for (size_t i = 0; i < n; i++) {                                                                       \
                ACC acc = block[i], x = LOAD(source[i]);                                                           \
                block[i] = COMBINE;                                                                                \
            }                                                                                                      \
        }                                                                                                          \
        for (size_t i = 0; i < n; i++) {                                                                           \
            ACC acc = block[i];                                                                                    \
            to[from + i] = STORE(FINISH);                                                                          \
        }                                                                                                          \
    }                                                                                                              \
    return;

/* U is the type of sums and products, so that integers wrap around instead of being undefined. */
#define DEFINE_REDUCE(NAME, T, ACC, U, LOAD, STORE)                                                                \
    static ISA_TARGET void FN(reduce_##NAME)(void *target, const void *const *sources, int num_sources,           \
                                             size_t numel, int op) {                                               \
        T *to = target;                                                                                            \
        ACC count = (ACC)num_sources;                                                                              \
        switch (op) {                                                                                              \
        case OP_SUM: LOOPS(T, ACC, LOAD, STORE, (ACC)((U)acc + (U)x), acc)                                         \
        case OP_MEAN: LOOPS(T, ACC, LOAD, STORE, (ACC)((U)acc + (U)x), (ACC)(acc / count))                         \
        case OP_MAX: LOOPS(T, ACC, LOAD, STORE, acc > x || acc != acc ? acc : x, acc)                              \
        case OP_MIN: LOOPS(T, ACC, LOAD, STORE, acc < x || acc != acc ? acc : x, acc)                              \
        case OP_PRODUCT: LOOPS(T, ACC, LOAD, STORE, (ACC)((U)acc * (U)x), acc)                                     \
        default: return;                                                                                           \
        }                                                                                                          \
    }

DEFINE_REDUCE(f32, float, float, float, SAME, SAME)
DEFINE_REDUCE(f64, double, double, double, SAME, SAME)
DEFINE_REDUCE(f16, uint16_t, float, float, FN(from_f16), FN(to_f16))
DEFINE_REDUCE(bf16, uint16_t, float, float, FN(from_bf16), FN(to_bf16))
DEFINE_REDUCE(i8, int8_t, int8_t, uint32_t, SAME, SAME)
DEFINE_REDUCE(u8, uint8_t, uint8_t, uint32_t, SAME, SAME)
DEFINE_REDUCE(i16, int16_t, int16_t, uint32_t, SAME, SAME)
DEFINE_REDUCE(i32, int32_t, int32_t, uint32_t, SAME, SAME)
DEFINE_REDUCE(i64, int64_t, int64_t, uint64_t, SAME, SAME)

static const reduce_fn FN(reduce_table)[NUM_DTYPES] = {
    [DTYPE_F32] = FN(reduce_f32), [DTYPE_F64] = FN(reduce_f64), [DTYPE_F16] = FN(reduce_f16),
    [DTYPE_BF16] = FN(reduce_bf16), [DTYPE_I8] = FN(reduce_i8), [DTYPE_U8] = FN(reduce_u8),
    [DTYPE_I16] = FN(reduce_i16), [DTYPE_I32] = FN(reduce_i32), [DTYPE_I64] = FN(reduce_i64),
};

#undef SAME
#undef LOOPS
#undef DEFINE_REDUCE
