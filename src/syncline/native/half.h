/* Conversions between fp32 and 16-bit floating-point types, rounded to the nearest even. Included by `each_isa.h`. */

static inline ISA_TARGET float FN(from_bf16)(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline ISA_TARGET uint16_t FN(to_bf16)(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 | (bits >> 31 << 15) : rounded);
}

static inline ISA_TARGET float FN(from_f16)(uint16_t x) {
    /* A subnormal number becomes normal by an addition, whose own numbers are normal. So the result does not depend on
     * whether the processor takes subnormal numbers for zero. */
    uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13;
    uint32_t above = magnitude + 0x38800000; /* 2^-14 higher, if it is subnormal */
    float small;
    memcpy(&small, &above, sizeof small);
    small -= 0x1p-14f;
    uint32_t subnormal;
    memcpy(&subnormal, &small, sizeof subnormal);
    uint32_t is_small = -(uint32_t)((x & 0x7c00) == 0); /* see to_f16 for masks */
    uint32_t bits = (subnormal & is_small) | ((magnitude + 0x38000000) & ~is_small);
    uint32_t is_special = -(uint32_t)((x & 0x7c00) == 0x7c00); /* infinity or NaN */
    bits |= (is_special & 0x7f800000) | (uint32_t)(x & 0x8000) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline ISA_TARGET uint16_t FN(to_f16)(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t sign = bits >> 31 << 15;
    uint32_t magnitude = bits & 0x7fffffff;
    /* Below the smallest normal number: adding 0.5 leaves the subnormal's bits, rounded, at the end. */
    float small;
    memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    uint32_t subnormal;
    memcpy(&subnormal, &small, sizeof subnormal);
    subnormal -= 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* By masks: gcc turns choices of which one implies another into branches, and then does not vectorize. */
    uint32_t is_small = -(uint32_t)(magnitude < 0x38800000);
    uint32_t is_large = -(uint32_t)(magnitude >= 0x477ff000); /* from 65520 up: infinity */
    uint32_t is_nan = -(uint32_t)(magnitude > 0x7f800000);
    uint32_t result = (subnormal & is_small) | (normal & ~is_small & ~is_large);
    result |= (0x7c00 & is_large) | (0x0200 & is_nan);
    return (uint16_t)(sign | result);
}
