/* Linear layers: rows x weights, in tiles of up to MAX_TILE rows and PANEL output features.
 *
 * Each output is one chain of fused multiply-adds over the input features in order (8-bit: over groups of
 * them), whatever tile it falls in; so a row's result doesn't depend on the other rows. */
#pragma once

#include "simd.h"
#include "team.h"

enum { FLOAT32, FLOAT16, INT8 };
enum { STORE, ADD, GATED_SILU, GELU_TANH };

#define GROUP 32 /* input features that share a scale, 8-bit */

/* 8-bit weights of one group and one panel. */
typedef struct {
    float scales[PANEL];
    int8_t bytes[GROUP / 2][PANEL][2];
} block8;

typedef struct {
    int32_t format, num_outputs, num_inputs;
    const void *weights; /* panels, each over all inputs */
    const float *bias;   /* [num_outputs] or NULL */
} linear;

/* Rows as a linear layer reads them: floats, and for 8-bit layers the same in 16 bits. */
typedef struct {
    const float *values; /* [num_rows][stride] */
    long stride;
    int16_t *shorts; /* [num_rows][groups * GROUP] */
    float *scales;   /* [num_rows][groups] */
} rows_in;

static int groups_of(int num_inputs) { return (num_inputs + GROUP - 1) / GROUP; }
static int panels_of(int num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

INLINE void tile_n(const int asked, const int half, const float *x, long x_stride, const void *w,
                   long w_stride, long count, const char *ahead, long ahead_step, float *out) {
    const int num_rows = asked < MAX_TILE ? asked : MAX_TILE; /* for the compiler, which sees 12 where 6 is most */
    vec acc[MAX_TILE][2];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++) acc[r][0] = acc[r][1] = (vec){0};
    for (long k = 0; k < count; k++) {
        vec left, right;
        if (asked > 2) { /* with fewer rows the processor runs ahead by itself */
            __builtin_prefetch(ahead + k * ahead_step, 0, 2);
            if (!half) __builtin_prefetch(ahead + k * ahead_step + 64, 0, 2);
        }
        if (half) {
            const uint16_t *p = (const uint16_t *)w + k * w_stride;
            left = load_half(p), right = load_half(p + VL);
        } else {
            const float *p = (const float *)w + k * w_stride;
            left = load(p), right = load(p + VL);
        }
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++) {
            vec factor = splat(x[r * x_stride + k]);
            acc[r][0] = fma_v(factor, left, acc[r][0]);
            acc[r][1] = fma_v(factor, right, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++) {
        store(out + r * PANEL, acc[r][0]);
        store(out + r * PANEL + VL, acc[r][1]);
    }
}

#define CASES(call)                                                                                               \
    switch (num_rows) {                                                                                           \
        case 1: call(1); break;                                                                                   \
        case 2: call(2); break;                                                                                   \
        case 3: call(3); break;                                                                                   \
        case 4: call(4); break;                                                                                   \
        case 5: call(5); break;                                                                                   \
        case 6: call(6); break;                                                                                   \
        case 7: call(7); break;                                                                                   \
        case 8: call(8); break;                                                                                   \
        case 9: call(9); break;                                                                                   \
        case 10: call(10); break;                                                                                 \
        case 11: call(11); break;                                                                                 \
        case 12: call(12); break;                                                                                 \
    }

/* out[r][lane] = sum over k of x[r][k] * w[k][lane]. Meanwhile fetches what will be read next from `ahead` on,
 * `ahead_step` bytes for each k. */
static void tile_float32(int num_rows, const float *x, long x_stride, const float *w, long w_stride, long count,
                         const void *ahead, long ahead_step, float *out) {
#define CALL(n) tile_n(n, 0, x, x_stride, w, w_stride, count, ahead, ahead_step, out)
    CASES(CALL)
#undef CALL
}

static void tile_float16(int num_rows, const float *x, long x_stride, const uint16_t *w, long count,
                         const void *ahead, long ahead_step, float *out) {
#define CALL(n) tile_n(n, 1, x, x_stride, w, PANEL, count, ahead, ahead_step, out)
    CASES(CALL)
#undef CALL
}

#define MAX_TILE8 (MAX_TILE < 6 ? MAX_TILE : 6) /* a row takes twice the registers */

/* acc[lane] += w[lane][0] * pair[0] + w[lane][1] * pair[1], exact in 32 bits, for VL lanes. */
INLINE ivec add_pairs(ivec acc, const int8_t (*w)[2], int32_t pair) {
#if defined(__AVX512VNNI__)
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
    return (ivec)_mm512_dpwssd_epi32((__m512i)acc, wide, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
    return acc + (ivec)_mm512_madd_epi16(wide, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
    return acc + (ivec)_mm256_madd_epi16(wide, _mm256_set1_epi32(pair));
#else
    int16_t x[2];
    memcpy(x, &pair, sizeof x);
    for (int lane = 0; lane < VL; lane++) acc[lane] += w[lane][0] * x[0] + w[lane][1] * x[1];
    return acc;
#endif
}

/* out[r][lane] = sum over groups of scales x (sum over k of weight x[r][k]); the inner sums are exact. */
INLINE void tile8_n(const int num_rows, const rows_in *in, int first, const block8 *w, int groups,
                    const char *ahead, long ahead_step, float *out) {
    vec acc[MAX_TILE8][2];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++) acc[r][0] = acc[r][1] = (vec){0};
    for (int g = 0; g < groups; g++, w++) {
        vec left = load(w->scales), right = load(w->scales + VL);
        for (long at = 0; at < ahead_step; at += 64) __builtin_prefetch(ahead + g * ahead_step + at, 0, 2);
        const int16_t *x = in->shorts + ((long)first * groups + g) * GROUP;
        ivec dot[MAX_TILE8][2];
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++) dot[r][0] = dot[r][1] = (ivec){0};
        for (int k = 0; k < GROUP / 2; k++) {
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                int32_t pair;
                memcpy(&pair, x + (long)r * groups * GROUP + 2 * k, sizeof pair);
                dot[r][0] = add_pairs(dot[r][0], w->bytes[k], pair);
                dot[r][1] = add_pairs(dot[r][1], w->bytes[k] + VL, pair);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++) {
            vec scale = splat(in->scales[(long)(first + r) * groups + g]);
            acc[r][0] = fma_v(__builtin_convertvector(dot[r][0], vec), left * scale, acc[r][0]);
            acc[r][1] = fma_v(__builtin_convertvector(dot[r][1], vec), right * scale, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++) {
        store(out + r * PANEL, acc[r][0]);
        store(out + r * PANEL + VL, acc[r][1]);
    }
}

static void tile_int8(int num_rows, const rows_in *in, int first, const block8 *w, int groups,
                      const void *ahead, long ahead_step, float *out) {
#define CALL(n) tile8_n(n < MAX_TILE8 ? n : MAX_TILE8, in, first, w, groups, ahead, ahead_step, out)
    CASES(CALL)
#undef CALL
}

INLINE vec silu(vec x) { return x / (splat(1.0f) + exp_v(-x)); }

INLINE vec gelu_tanh(vec x) {
    vec inner = splat(0.7978845608f) * fma_v(splat(0.044715f) * x * x, x, x);
    /* 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)) */
    return x / (splat(1.0f) + exp_v(splat(-2.0f) * inner));
}

/* What becomes of a row's panel of sums. A gated panel holds VL gates, then the VL values they scale. */
INLINE void finish(const linear *l, int panel, const float *sums, int then, float *out) {
    int column = panel * PANEL, width = l->num_outputs - column < PANEL ? l->num_outputs - column : PANEL;
    vec left = load(sums), right = load(sums + VL);
    if (l->bias && width == PANEL)
        left += load(l->bias + column), right += load(l->bias + column + VL);
    else if (l->bias)
        for (int i = 0; i < width; i++) i < VL ? (left[i] += l->bias[column + i]) : (right[i - VL] += l->bias[column + i]);
    if (then == GATED_SILU) {
        store(out + column / 2, silu(left) * right);
        return;
    }
    if (then == GELU_TANH) left = gelu_tanh(left), right = gelu_tanh(right);
    if (width == PANEL) {
        if (then == ADD) left += load(out + column), right += load(out + column + VL);
        store(out + column, left), store(out + column + VL, right);
    } else
        for (int i = 0; i < width; i++) {
            float sum = i < VL ? left[i] : right[i - VL];
            out[column + i] = then == ADD ? out[column + i] + sum : sum;
        }
}

/* One phase: out = then(in x weights + bias). `out` has `out_stride` floats a row. */
static void run_linear(team *t, const linear *l, const rows_in *in, int num_rows, int then, float *out,
                       long out_stride) {
    int num_panels = panels_of(l->num_outputs), groups = groups_of(l->num_inputs), inputs = l->num_inputs;
    int at_once = num_panels / (16 * t->size), most = l->format == INT8 ? MAX_TILE8 : MAX_TILE;
    int num_tiles = (num_rows + most - 1) / most;
    long step = l->format == INT8 ? sizeof(block8) : l->format == FLOAT16 ? PANEL * 2 : PANEL * 4;
    long panel_bytes = step * (l->format == INT8 ? groups : inputs);
    float sums[MAX_TILE * PANEL] __attribute__((aligned(64)));
    int begin, end;
    while (take(t, num_panels, at_once > 1 ? at_once : 1, &begin, &end))
        for (int panel = begin; panel < end; panel++) {
            /* Behind this piece comes, most likely, the first that nobody has taken. */
            long next = panel + 1 < end ? panel + 1 : atomic_load_explicit(&t->next, memory_order_relaxed);
            for (int tile = 0; tile < num_tiles; tile++) {
                /* Tiles of like size: 16 rows are 8 + 8, not 12 + 4. */
                int first = (long)tile * num_rows / num_tiles, last = (long)(tile + 1) * num_rows / num_tiles;
                int count = last - first;
                const float *x = in->values + first * in->stride;
                const char *w = (const char *)l->weights + panel * panel_bytes;
                /* Each tile fetches its share of the next panel, so that memory is busy all the time. */
                const char *ahead = (const char *)l->weights + next * panel_bytes + panel_bytes * tile / num_tiles;
                if (l->format == FLOAT32)
                    tile_float32(count, x, in->stride, (const float *)w, PANEL, inputs, ahead, step / num_tiles, sums);
                else if (l->format == FLOAT16)
                    tile_float16(count, x, in->stride, (const uint16_t *)w, inputs, ahead, step / num_tiles, sums);
                else
                    tile_int8(count, in, first, (const block8 *)w, groups, ahead, step / num_tiles, sums);
                for (int r = 0; r < count; r++)
                    finish(l, panel, sums + r * PANEL, then, out + (first + r) * out_stride);
            }
        }
    meet(t);
}

/* Rounds a row to 16 bits, each group with the scale that its largest value needs. */
static void quantize_row(const rows_in *in, int row, int num_inputs) {
    int groups = groups_of(num_inputs);
    const float *values = in->values + row * in->stride;
    for (int g = 0; g < groups; g++) {
        int begin = g * GROUP, count = num_inputs - begin < GROUP ? num_inputs - begin : GROUP;
        int16_t *shorts = in->shorts + ((long)row * groups + g) * GROUP;
        float largest = 0.0f;
        for (int i = 0; i < count; i++) {
            float size = fabsf(values[begin + i]);
            largest = size > largest ? size : largest;
        }
        float inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
        for (int i = 0; i < GROUP; i++) shorts[i] = i < count ? (int16_t)rintf(values[begin + i] * inverse) : 0;
        in->scales[(long)row * groups + g] = largest / 32767.0f;
    }
}

/* One phase, for 8-bit layers only: brings the rows into 16 bits. */
static void quantize(team *t, const linear *l, const rows_in *in, int num_rows) {
    if (l->format != INT8) return;
    int begin, end;
    while (take(t, num_rows, 1, &begin, &end)) quantize_row(in, begin, l->num_inputs);
    meet(t);
}
