/* Attention of the new rows of one session over the rows that each may see.
 *
 * A row sees the first `base` rows of its session and then its drafted ancestors and itself, in the order of
 * the path. All sums run in that order, so that a drafted token's result is, to the last bit, what it would be
 * as a token of the context. */
#pragma once

#include "linear.h"

typedef struct {
    float *keys;   /* [num_layers][num_kv_heads][capacity / PANEL][head_dim][PANEL] */
    float *values; /* [num_layers][num_kv_heads][capacity][head_dim] */
    const int32_t *parents; /* of the rows behind the path, as row indices */
    int64_t capacity;
    int32_t length, path_length, num_new; /* the new rows are the last */
    int32_t first_row;                    /* of the new ones, in the pass */
} segment;

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim;
    float scale;
} heads;

/* The rows that row `row` sees: the first *base, then `chain` in rising order. Returns the chain's length. */
static int visible(const segment *s, int row, int *base, int *chain) {
    int length = 0;
    while (row >= s->path_length) {
        chain[length++] = row;
        row = s->parents[row - s->path_length];
    }
    *base = row + 1;
    for (int i = 0; i < length / 2; i++) {
        int other = chain[i];
        chain[i] = chain[length - 1 - i], chain[length - 1 - i] = other;
    }
    return length;
}

static int position(const segment *s, int row) {
    int depth = 0;
    for (; row >= s->path_length; depth++) row = s->parents[row - s->path_length];
    return row + depth;
}

/* Where a row's key begins; its dimensions lie PANEL apart. */
static float *key_of(const segment *s, const heads *h, int layer, int kv_head, int row) {
    long head = ((long)layer * h->num_kv_heads + kv_head) * s->capacity;
    return s->keys + (head + row / PANEL * PANEL) * h->head_dim + row % PANEL;
}

static float *value_of(const segment *s, const heads *h, int layer, int kv_head, int row) {
    return s->values + (((long)layer * h->num_kv_heads + kv_head) * s->capacity + row) * h->head_dim;
}

/* One thread's working memory. */
typedef struct {
    float *floats; /* MAX_TILE queries, and MAX_TILE lines as long as the longest session */
    int *ints;     /* MAX_TILE chains */
} scratch;

/* scores -> weights that sum to 1, over `count` scores. */
static void softmax(float *scores, int count) {
    int padded = (count + VL - 1) / VL * VL;
    for (int j = count; j < padded; j++) scores[j] = -INFINITY;
    vec largest = load(scores);
    for (int j = VL; j < padded; j += VL) {
        vec next = load(scores + j);
        largest = select_v(next > largest, next, largest);
    }
    float most = largest[0];
    for (int i = 1; i < VL; i++) most = largest[i] > most ? largest[i] : most;
    vec total = {0};
    for (int j = 0; j < padded; j += VL) {
        vec weight = exp_v(load(scores + j) - splat(most));
        if (j + VL > count)
            for (int i = count - j; i < VL; i++) weight[i] = 0.0f;
        total += weight;
        store(scores + j, weight);
    }
    vec inverse = splat(1.0f / sum_lanes(total));
    for (int j = 0; j < padded; j += VL) store(scores + j, load(scores + j) * inverse);
}

/* One piece: queries [first, first + count) of one key-value head. Query u is row u / shared of the segment's
 * new rows, and of the heads that share the keys number u % shared. */
static void attend(const segment *s, const heads *h, int layer, int kv_head, int first, int count,
                   const float *queries, long stride, float *out, scratch *m) {
    int dim = h->head_dim, shared = h->num_heads / h->num_kv_heads, old = s->length - s->num_new;
    int limit = old + (first + count - 1) / shared + 1; /* no query sees a row behind this one */
    long length = (limit + PANEL - 1) / PANEL * PANEL;
    const float *values = value_of(s, h, layer, kv_head, 0);
    float *copies = m->floats, *scores = copies + (long)MAX_TILE * dim;
    int bases[MAX_TILE], chains[MAX_TILE], common = limit, *chain = m->ints;
    float sums[MAX_TILE * PANEL] __attribute__((aligned(64)));

    for (int u = 0; u < count; u++) {
        int row = (first + u) / shared, head = kv_head * shared + (first + u) % shared;
        memcpy(copies + (long)u * dim, queries + row * stride + (long)head * dim, dim * sizeof(float));
        chains[u] = visible(s, old + row, &bases[u], chain + (long)u * s->num_new);
        common = bases[u] < common ? bases[u] : common;
    }
    for (int j = 0; j < limit; j += PANEL) {
        tile_float32(count, copies, dim, key_of(s, h, layer, kv_head, j), PANEL, dim,
                     key_of(s, h, layer, kv_head, j + PANEL), PANEL * sizeof(float), sums);
        for (int u = 0; u < count; u++) memcpy(scores + u * length + j, sums + u * PANEL, PANEL * sizeof(float));
    }
    for (int u = 0; u < count; u++) {
        float *line = scores + u * length;
        const int *tail = chain + (long)u * s->num_new;
        for (int i = 0; i < chains[u]; i++) line[bases[u] + i] = line[tail[i]];
        softmax(line, bases[u] + chains[u]);
    }
    for (int d = 0; d < dim; d += PANEL) {
        int width = dim - d < PANEL ? dim - d : PANEL;
        if (width == PANEL)
            tile_float32(count, scores, length, values + d, dim, common, values + d + 8 * dim, dim * sizeof(float), sums);
        else /* the same chain, a number at a time */
            for (int u = 0; u < count; u++)
                for (int i = 0; i < width; i++) {
                    float sum = 0.0f;
                    for (int j = 0; j < common; j++)
                        sum = fmaf(scores[u * length + j], values[(long)j * dim + d + i], sum);
                    sums[u * PANEL + i] = sum;
                }
        for (int u = 0; u < count; u++) {
            int row = (first + u) / shared, head = kv_head * shared + (first + u) % shared;
            const int *tail = chain + (long)u * s->num_new;
            const float *line = scores + u * length;
            for (int j = common; j < bases[u] + chains[u]; j++) {
                const float *value = values + (long)(j < bases[u] ? j : tail[j - bases[u]]) * dim + d;
                for (int i = 0; i < width; i++) sums[u * PANEL + i] = fmaf(line[j], value[i], sums[u * PANEL + i]);
            }
            memcpy(out + ((long)row * h->num_heads + head) * dim + d, sums + u * PANEL, width * sizeof(float));
        }
    }
}
