/* One vector type for every processor: VL floats, by GCC's vector extensions.
 *
 * Every product is added with `fma_v` or fmaf, in an order that the source fixes; the file is compiled with
 * contraction off. So a sum is the same to the last bit however rows are grouped into tiles. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define MAX_TILE 12 /* rows; 2 accumulators each, of 32 registers */
#elif defined(__AVX__)
#define VL 8
#define MAX_TILE 6
#else
#define VL 4
#define MAX_TILE 4
#endif

#define PANEL (2 * VL) /* output features that a tile computes together */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * VL)));
typedef float vec_u __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * VL)));

INLINE vec load(const float *p) { return *(const vec_u *)p; }
INLINE void store(float *p, vec v) { *(vec_u *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec fma_v(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int i = 0; i < VL; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, bits;
    if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

INLINE vec load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vec v;
    for (int i = 0; i < VL; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

INLINE vec select_v(ivec mask, vec a, vec b) {
    ivec x, y;
    memcpy(&x, &a, sizeof x), memcpy(&y, &b, sizeof y);
    x = (x & mask) | (y & ~mask);
    memcpy(&a, &x, sizeof a);
    return a;
}

/* exp within 2 units in the last place, for arguments brought between -88 and 88. NaN stays NaN. */
INLINE vec exp_v(vec x) {
    x = select_v(x > splat(88.0f), splat(88.0f), x);
    x = select_v(x < splat(-88.0f), splat(-88.0f), x);
    const vec magic = splat(12582912.0f); /* adding it rounds to an integer */
    vec n = fma_v(x, splat(1.44269504f), magic) - magic;
    vec r = fma_v(n, splat(-0.693359375f), x);
    r = fma_v(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = fma_v(p, r, splat(1.3981999507e-3f));
    p = fma_v(p, r, splat(8.3334519073e-3f));
    p = fma_v(p, r, splat(4.1665795894e-2f));
    p = fma_v(p, r, splat(1.6666665459e-1f));
    p = fma_v(p, r, splat(5.0000001201e-1f));
    p = fma_v(p, r * r, r + splat(1.0f));
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec power;
    memcpy(&power, &exponent, sizeof power);
    return p * power;
}

/* Sum of all lanes, in a fixed order. */
INLINE float sum_lanes(vec v) {
    float lanes[VL];
    memcpy(lanes, &v, sizeof lanes);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
